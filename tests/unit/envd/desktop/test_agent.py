"""The client of the guest agent, against a scripted agent."""

import base64
import time
from collections.abc import Callable
from typing import Any

import pytest

from envd.base.errors import GuestError, GuestUnresponsive
from envd.desktop.agent import GuestAgent, guest_machine_id, renew_identity
from tests.support.stubs import StubChannels


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class ScriptedChannels(StubChannels):
    """Answers agent commands with functions by name, and records the requests."""

    def __init__(self, **answers: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self._answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.timeouts_s: list[float] = []

    def answer(self, command: str, fields: dict[str, Any], timeout_s: float) -> Any:
        self.asked.append((command, fields))
        self.timeouts_s.append(timeout_s)
        return self._answers[command](fields)

    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


class Files:
    """The agent's files, with short reads and short writes as in the real one."""

    def __init__(self, **files: bytes) -> None:
        self.files = {f"/{name}": bytearray(data) for name, data in files.items()}
        self._handles: dict[int, tuple[str, int]] = {}
        self.open_count = 0

    def channels(self, **answers: Callable[[dict[str, Any]], Any]) -> ScriptedChannels:
        return ScriptedChannels(
            **answers,
            guest_file_open=self._open,
            guest_file_read=self._read,
            guest_file_write=self._write,
            guest_file_flush=lambda fields: {},
            guest_file_close=self._close,
        )

    def _open(self, fields: dict[str, Any]) -> int:
        path, mode = fields["path"], fields["mode"]
        if mode == "w":
            self.files[path] = bytearray()
        elif path not in self.files:
            raise GuestError(f"failed to open file '{path}' (mode: 'r'): No such file or directory")
        self.open_count += 1
        self._handles[self.open_count] = (path, 0)
        return self.open_count

    def _read(self, fields: dict[str, Any]) -> dict[str, Any]:
        path, at = self._handles[fields["handle"]]
        data = bytes(self.files[path][at : at + min(fields["count"], 700)])
        self._handles[fields["handle"]] = (path, at + len(data))
        return {"count": len(data), "buf-b64": b64(data), "eof": not data}

    def _write(self, fields: dict[str, Any]) -> dict[str, Any]:
        path, _ = self._handles[fields["handle"]]
        data = base64.b64decode(fields["buf-b64"])[:900_000]
        self.files[path] += data
        return {"count": len(data), "eof": False}

    def _close(self, fields: dict[str, Any]) -> dict[str, Any]:
        del self._handles[fields["handle"]]
        return {}

    @property
    def open_handles(self) -> int:
        return len(self._handles)


def exits_after(polls: int, **status: Any) -> Callable[[dict[str, Any]], Any]:
    left = [polls]

    def answer(fields: dict[str, Any]) -> dict[str, Any]:
        left[0] -= 1
        return {"exited": True, **status} if left[0] < 0 else {"exited": False}

    return answer


async def test_a_command_runs_with_input_and_environment_and_is_polled_until_it_exits() -> None:
    status = exits_after(3, exitcode=7, **{"out-data": b64(b"\0out"), "err-data": b64(b"err")})
    channels = ScriptedChannels(guest_exec=lambda fields: {"pid": 41}, guest_exec_status=status)
    result = await GuestAgent(channels).run(["/bin/x", "-a", "b c"], timeout_s=10, stdin=b"\xff", env={"K": "v=w"})
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"\0out", b"err")
    assert channels.asked[0] == (
        "guest-exec",
        {"path": "/bin/x", "arg": ["-a", "b c"], "capture-output": True, "input-data": b64(b"\xff"), "env": ["K=v=w"]},
    )
    assert channels.asked[1:] == [("guest-exec-status", {"pid": 41})] * 4
    assert all(timeout_s <= 10 for timeout_s in channels.timeouts_s)


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [
        ({"signal": 9}, 137),
        ({"exitcode": 1 << 40}, (1 << 31) - 1),
        ({"exitcode": -(1 << 40)}, -(1 << 31)),
        ({"signal": 1 << 31}, 2**31 - 1),
    ],
)
async def test_an_exit_code_is_that_of_a_shell_within_32_bits(status: dict[str, int], exit_code: int) -> None:
    channels = ScriptedChannels(guest_exec=lambda _: {"pid": 1}, guest_exec_status=exits_after(0, **status))
    assert (await GuestAgent(channels).run(["x"], timeout_s=60.0)).exit_code == exit_code


async def test_output_that_the_agent_truncated_is_an_error() -> None:
    status = exits_after(0, exitcode=0, **{"out-data": b64(b"half"), "out-truncated": True})
    channels = ScriptedChannels(guest_exec=lambda _: {"pid": 1}, guest_exec_status=status)
    with pytest.raises(GuestError, match="limit"):
        await GuestAgent(channels).run(["x"], timeout_s=60.0)


async def test_a_command_past_its_deadline_is_killed() -> None:
    channels = ScriptedChannels(guest_exec=lambda _: {"pid": 41}, guest_exec_status=lambda _: {"exited": False})
    with pytest.raises(GuestUnresponsive, match=r"sleep on m-1: .*0\.02 s"):
        await GuestAgent(channels).run(["sleep"], timeout_s=0.02)
    kills = [fields for name, fields in channels.asked if name == "guest-exec"][1:]
    assert kills == [{"path": "/bin/kill", "arg": ["-KILL", "41"]}]


@pytest.mark.parametrize("answer", [None, {}, {"pid": "x"}, []])
async def test_a_malformed_response_is_an_error(answer: Any) -> None:
    channels = ScriptedChannels(guest_exec=lambda _: answer)
    with pytest.raises(GuestError, match="guest-exec"):
        await GuestAgent(channels).run(["x"], timeout_s=60.0)


@pytest.mark.parametrize("size", [0, 1, 1999, 2000])
async def test_a_file_is_read_to_its_end(size: int) -> None:
    files = Files(data=bytes(range(256)) * 8)
    files.files["/data"] = files.files["/data"][:size]
    content = await GuestAgent(files.channels()).read_file("/data", max_bytes=2000)
    assert content == bytes(files.files["/data"])
    assert files.open_handles == 0


async def test_a_file_over_the_limit_is_rejected_and_its_handle_closed() -> None:
    files = Files(data=b"x" * 2001)
    with pytest.raises(GuestError, match=r"/data on m-1 .*2000 bytes"):
        await GuestAgent(files.channels()).read_file("/data", max_bytes=2000)
    assert files.open_handles == 0


async def test_a_missing_file_is_none_and_a_forbidden_one_an_error() -> None:
    assert await GuestAgent(Files().channels()).read_file("/absent") is None

    def forbid(fields: dict[str, Any]) -> int:
        raise GuestError("failed to open file '/root/x' (mode: 'r'): Permission denied")

    with pytest.raises(GuestError, match="Permission denied"):
        await GuestAgent(ScriptedChannels(guest_file_open=forbid)).read_file("/root/x")


async def test_a_file_is_written_completely_through_short_writes() -> None:
    files, data = Files(), bytes(range(256)) * 10_000
    channels = files.channels()
    await GuestAgent(channels).write_file("/new", data)
    assert bytes(files.files["/new"]) == data
    assert channels.names()[-2:] == ["guest-file-flush", "guest-file-close"]
    assert files.open_handles == 0


async def test_a_full_disk_is_an_error_and_the_handle_closed() -> None:
    files = Files()
    channels = files.channels()
    channels._answers["guest-file-write"] = lambda fields: {"count": 0, "eof": False}
    with pytest.raises(GuestError, match="after 0 bytes"):
        await GuestAgent(channels).write_file("/new", b"x")
    assert files.open_handles == 0


def refuse_hwclock(fields: dict[str, Any]) -> None:
    raise GuestError("hwclock failed to set hardware clock to system time")


async def test_a_clock_that_was_set_without_hwclock_counts_as_set() -> None:
    now_ns = 1_700_000_000_000_000_000
    channels = ScriptedChannels(guest_set_time=refuse_hwclock, guest_get_time=lambda _: now_ns + 10**9)
    await GuestAgent(channels).set_time(now_ns)
    assert channels.asked[0] == ("guest-set-time", {"time": now_ns})
    assert channels.names() == ["guest-set-time", "guest-get-time"]


async def test_a_clock_that_was_not_set_is_an_error() -> None:
    channels = ScriptedChannels(guest_set_time=refuse_hwclock, guest_get_time=lambda _: 0)
    with pytest.raises(GuestError, match="hwclock"):
        await GuestAgent(channels).set_time(1_700_000_000_000_000_000)


async def test_ping_passes_its_timeout() -> None:
    channels = ScriptedChannels(guest_ping=lambda _: {})
    await GuestAgent(channels).ping(timeout_s=2)
    assert channels.timeouts_s == [2]


# The identity that a fork gets before anything else runs in it


def refusing_date(files: Files, *, guest_time_ns: int) -> ScriptedChannels:
    """Return a guest in which `date` fails."""
    return files.channels(
        guest_exec=lambda _: {"pid": 1},
        guest_exec_status=exits_after(0, exitcode=1, **{"err-data": b64(b"no")}),
        guest_get_time=lambda _: guest_time_ns,
    )


async def test_a_fork_gets_the_hosts_time_its_own_id_and_fresh_entropy() -> None:
    seeds, ids = set(), set()
    for machine_id in ("desktop-1", "desktop-2"):
        files, before_s = Files(), time.time()
        channels = files.channels(guest_exec=lambda _: {"pid": 1}, guest_exec_status=exits_after(0, exitcode=0))
        await renew_identity(GuestAgent(channels), machine_id=machine_id, windows=False)
        (command,) = [fields for name, fields in channels.asked if name == "guest-exec"]
        *arguments, moment = command["arg"]
        assert [command["path"], *arguments] == ["/bin/date", "-u", "-s"]
        assert before_s - 1 <= float(moment.removeprefix("@")) <= time.time() + 1
        assert bytes(files.files["/etc/machine-id"]) == f"{guest_machine_id(machine_id)}\n".encode()
        seeds.add(bytes(files.files["/dev/urandom"]))
        ids.add(guest_machine_id(machine_id))
    assert [len(seed) for seed in seeds] == [64, 64]
    assert [len(each) for each in ids] == [32, 32]


async def test_a_fork_whose_clock_cannot_be_set_is_an_error_unless_it_has_the_hosts_clock() -> None:
    files = Files()
    with pytest.raises(GuestError, match=r"m-9: .*clock .*exit 1.*: no"):
        await renew_identity(GuestAgent(refusing_date(files, guest_time_ns=0)), machine_id="m-9", windows=False)
    channels = refusing_date(files, guest_time_ns=time.time_ns())
    await renew_identity(GuestAgent(channels), machine_id="m-9", windows=False)
    assert channels.names()[-1] == "guest-get-time"


async def test_in_a_windows_guest_only_the_clock_is_set() -> None:
    channels, before_ns = ScriptedChannels(guest_set_time=lambda _: {}), time.time_ns()
    await renew_identity(GuestAgent(channels), machine_id="m-9", windows=True)
    ((name, fields),) = channels.asked
    assert name == "guest-set-time"
    assert before_ns <= fields["time"] <= time.time_ns()
