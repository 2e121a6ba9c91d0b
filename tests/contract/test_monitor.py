"""Monitor against a scripted QEMU monitor on a real socket, with messages as QEMU sends them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from envd.base.errors import HypervisorError
from envd.hypervisor.qemu.monitor import Monitor

GREETING = {"QMP": {"version": {"qemu": {"micro": 0, "minor": 0, "major": 9}, "package": ""}, "capabilities": []}}
STAMP = {"timestamp": {"seconds": 1, "microseconds": 2}}
CONNECTED = {"event": "VNC_CONNECTED", "data": {}, **STAMP}
RESUME = {"event": "RESUME", **STAMP}
REFUSAL = {"error": {"class": "GenericError", "desc": "Resetting the Virtual Machine is required"}}

#: Returns a monitor's messages in response to a command and its id.
Responder = Callable[[str, int], list[object]]


def succeed(_command: str, number: int) -> list[object]:
    return [{"return": {}, "id": number}]


class ScriptedQemu:
    """A scripted monitor on a real socket."""

    def __init__(self, path: Path, responder: Responder, first_messages: list[object]) -> None:
        self.path = path
        self.commands: list[str] = []
        self.monitor = Monitor(path, machine_id="m1")
        self.connection_count = 0
        self._responder = responder
        self._first_messages = first_messages
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        self._writers.append(writer)
        self.send(*self._first_messages)
        while line := await reader.readline():
            request = json.loads(line)
            self.commands.append(request["execute"])
            self.send(*self._responder(request["execute"], request["id"]))

    def send(self, *messages: object) -> None:
        self._writers[-1].write(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))

    def disconnect(self) -> None:
        for writer in self._writers:
            writer.close()

    async def wait_for_commands(self, *commands: str) -> None:
        async with asyncio.timeout(30):
            while self.commands != list(commands):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def monitor(
    directory: Path, responder: Responder = succeed, *, first_messages: tuple[object, ...] = (GREETING,)
) -> AsyncIterator[ScriptedQemu]:
    served = ScriptedQemu(directory / "qmp", responder, list(first_messages))
    server = await asyncio.start_unix_server(served.serve, served.path)
    try:
        yield served
    finally:
        served.monitor.close()
        served.disconnect()
        server.close()
        await server.wait_closed()


def resume_by_event(command: str, number: int) -> list[object]:
    """Send the event of `cont` without its response."""
    return [RESUME] if command == "cont" else succeed(command, number)


async def test_events_before_the_greeting_are_ignored(tmp_path: Path) -> None:
    async with monitor(tmp_path, first_messages=(CONNECTED, CONNECTED, GREETING)) as qemu:
        await qemu.monitor.stop()
        await qemu.monitor.cont()
        assert qemu.commands == ["qmp_capabilities", "stop", "cont"]
        assert qemu.connection_count == 1


async def test_a_monitor_that_never_greets_is_an_error_that_names_the_machine(tmp_path: Path) -> None:
    async with monitor(tmp_path, first_messages=(CONNECTED,)) as qemu:
        with pytest.raises(HypervisorError, match=r"m1: .*0\.2 s"):
            await Monitor(qemu.path, machine_id="m1", timeout_s=0.2).stop()
        assert qemu.commands == []


async def test_a_missing_monitor_socket_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(HypervisorError, match=r"m1: .*No such file"):
        await Monitor(tmp_path / "qmp", machine_id="m1").cont()


async def test_cont_returns_on_the_resume_event(tmp_path: Path) -> None:
    async with monitor(tmp_path, resume_by_event) as qemu:
        await qemu.monitor.cont()
        assert qemu.commands == ["qmp_capabilities", "cont"]


async def test_a_response_after_its_event_is_not_taken_for_that_of_the_next_command(tmp_path: Path) -> None:
    def no_response_to_stop(command: str, number: int) -> list[object]:
        return [] if command == "stop" else resume_by_event(command, number)

    async with monitor(tmp_path, no_response_to_stop) as qemu:
        await qemu.monitor.cont()
        stopping = asyncio.create_task(qemu.monitor.stop())
        await qemu.wait_for_commands("qmp_capabilities", "cont", "stop")
        # The response to `cont` would complete `stop` without an error.
        qemu.send({"return": {}, "id": 2}, RESUME, {**REFUSAL, "id": 3})
        with pytest.raises(HypervisorError, match="stop"):
            await stopping


async def test_a_resume_event_does_not_complete_stop(tmp_path: Path) -> None:
    def reject_stop(command: str, number: int) -> list[object]:
        return [RESUME, {**REFUSAL, "id": number}] if command == "stop" else succeed(command, number)

    async with monitor(tmp_path, reject_stop) as qemu:
        with pytest.raises(HypervisorError, match="stop"):
            await qemu.monitor.stop()


async def test_an_error_response_is_raised_with_qemus_text_and_the_connection_stays(tmp_path: Path) -> None:
    def reject_cont(command: str, number: int) -> list[object]:
        return [{**REFUSAL, "id": number}] if command == "cont" else succeed(command, number)

    async with monitor(tmp_path, reject_cont) as qemu:
        with pytest.raises(HypervisorError, match=r"m1: .*cont: Resetting the Virtual Machine"):
            await qemu.monitor.cont()
        await qemu.monitor.stop()
        assert qemu.connection_count == 1


@pytest.mark.parametrize("words", ["a string", [1, 2], {"error": "not an object", "id": 2}], ids=str)
async def test_malformed_data_is_an_error_and_the_next_command_reconnects(tmp_path: Path, words: object) -> None:
    garbled = True

    def respond(command: str, number: int) -> list[object]:
        return [words] if garbled and command == "stop" else succeed(command, number)

    async with monitor(tmp_path, respond) as qemu:
        with pytest.raises(HypervisorError, match=r"m1: .*not QMP"):
            await qemu.monitor.stop()
        garbled = False
        await qemu.monitor.stop()
        assert qemu.connection_count == 2


async def test_a_line_without_end_is_an_error(tmp_path: Path) -> None:
    async with monitor(tmp_path, lambda command, number: ["x" * 3_000_000]) as qemu:
        with pytest.raises(HypervisorError, match="1048576 bytes"):
            await qemu.monitor.stop()


async def test_a_closed_connection_is_reopened_by_the_next_command(tmp_path: Path) -> None:
    async with monitor(tmp_path) as qemu:
        await qemu.monitor.stop()
        qemu.disconnect()
        with suppress(HypervisorError):  # If Monitor has not noticed the end yet.
            await qemu.monitor.cont()
        await qemu.monitor.cont()
        assert qemu.commands[-1] == "cont"
        assert qemu.connection_count == 2


async def test_close_fails_a_command_in_flight(tmp_path: Path) -> None:
    async with monitor(tmp_path, lambda command, number: [] if command == "stop" else succeed(command, number)) as qemu:
        stopping = asyncio.create_task(qemu.monitor.stop())
        await qemu.wait_for_commands("qmp_capabilities", "stop")
        qemu.monitor.close()
        with pytest.raises(HypervisorError, match=r"m1: .*closed"):
            await stopping


async def test_the_response_to_a_cancelled_command_is_ignored(tmp_path: Path) -> None:
    is_silent = True

    def respond(command: str, number: int) -> list[object]:
        return [] if is_silent and command == "stop" else succeed(command, number)

    async with monitor(tmp_path, respond) as qemu:
        stopping = asyncio.create_task(qemu.monitor.stop())
        await qemu.wait_for_commands("qmp_capabilities", "stop")
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        is_silent = False
        qemu.send({**REFUSAL, "id": 2})
        await qemu.monitor.cont()
        assert qemu.commands == ["qmp_capabilities", "stop", "cont"]
        assert qemu.connection_count == 1


async def test_a_command_returns_its_result(tmp_path: Path) -> None:
    async with monitor(tmp_path, lambda command, number: [{"return": {"status": "paused"}, "id": number}]) as qemu:
        assert await qemu.monitor.execute("query-status") == {"status": "paused"}


async def test_a_file_is_passed_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"the state")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "qmp"))
        listener.listen()

        def serve() -> tuple[dict[str, object], bytes]:
            with listener.accept()[0] as connection:
                connection.sendall(json.dumps(GREETING).encode() + b"\r\n")
                connection.recv(4096)
                connection.sendall(b'{"return": {}, "id": 1}\r\n')
                data, [received], _, _ = socket.recv_fds(connection, 4096, 1)
                with open(received, "rb") as file:
                    content = file.read()
                connection.sendall(b'{"return": {}, "id": 2}\r\n')
                return json.loads(data), content

        serving = asyncio.create_task(asyncio.to_thread(serve))
        monitor = Monitor(tmp_path / "qmp", machine_id="m1")
        with (tmp_path / "state").open("rb") as file:
            assert await monitor.execute("getfd", {"fdname": "state"}, file=file.fileno()) == {}
        request, content = await serving
        monitor.close()
    assert (request["execute"], request["arguments"], content) == ("getfd", {"fdname": "state"}, b"the state")
