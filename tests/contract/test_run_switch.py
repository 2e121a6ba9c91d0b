"""The switch against a monitor whose first words are wrong: a real socket, and what QEMU was seen to send over it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from envd.errors import HypervisorError
from envd.hypervisor.run_switch import RunSwitch

GREETING = {"QMP": {"version": {"qemu": {"micro": 0, "minor": 0, "major": 9}, "package": ""}, "capabilities": []}}
EVENT = {"event": "VNC_CONNECTED", "data": {}, "timestamp": {"seconds": 1, "microseconds": 2}}


@asynccontextmanager
async def monitor(path: Path, first_words: Callable[[int], object]) -> AsyncIterator[list[str]]:
    """Serve a monitor that says `first_words(number of the connection)` and then answers; yields what it was told."""
    told: list[str] = []
    connections = 0
    over: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        over.append(asyncio.create_task(writer.wait_closed()))
        writer.write(json.dumps(first_words(connections)).encode() + b"\r\n")
        while received := await reader.read(65536):  # one whole request, which no line end follows
            request = json.loads(received)
            told.append(request["execute"])
            echoed = {"id": request["id"]} if "id" in request else {}  # qmp_capabilities has none
            writer.write(json.dumps({"return": {}, **echoed}).encode() + b"\r\n")
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    async with server:
        yield told
        await asyncio.gather(*over)


async def test_an_event_before_the_greeting_is_put_up_with(tmp_path: Path) -> None:
    async with monitor(tmp_path / "qmp", lambda number: EVENT if number < 3 else GREETING) as told:
        switch = RunSwitch(tmp_path / "qmp", machine_id="m1")
        await switch.stop()
        await switch.go()
        await switch.close()
    assert told == ["qmp_capabilities", "stop", "cont"]


async def test_a_monitor_that_never_greets_is_an_error_that_names_the_machine(tmp_path: Path) -> None:
    async with monitor(tmp_path / "qmp", lambda _number: EVENT) as told:
        with pytest.raises(HypervisorError, match=r"machine m1: its monitor does not answer: .*Greeting"):
            await RunSwitch(tmp_path / "qmp", machine_id="m1").stop()
    assert told == []


async def test_a_monitor_that_is_not_there_is_not_called_again(tmp_path: Path) -> None:
    with pytest.raises(HypervisorError, match=r"machine m1: its monitor does not answer: .*No such file"):
        await RunSwitch(tmp_path / "qmp", machine_id="m1").go()
