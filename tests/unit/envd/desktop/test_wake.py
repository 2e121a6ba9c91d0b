"""The identity that a fork gets before anything else runs in it."""

import base64
import time
from typing import Any

import pytest

from envd.base.errors import GuestError
from envd.desktop.agent import GuestAgent, guest_machine_id, renew_identity
from tests.support.stubs import StubChannels


class ScriptedGuest(StubChannels):
    """An agent that records written files and commands."""

    def __init__(self, *, exit_code: int = 0) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.ran: list[list[str]] = []
        self.asked: list[str] = []
        self.time_ns = 0
        self._exit_code = exit_code
        self._open = ""

    def answer(self, command: str, fields: dict[str, Any], timeout_s: float) -> Any:
        self.asked.append(command)
        match command:
            case "guest-file-open":
                self._open = fields["path"]
                return 1
            case "guest-file-write":
                data = base64.b64decode(fields["buf-b64"])
                self.files[self._open] = self.files.get(self._open, b"") + data
                return {"count": len(data), "eof": False}
            case "guest-exec":
                self.ran.append([fields["path"], *fields["arg"]])
                return {"pid": 1}
            case "guest-exec-status":
                return {"exited": True, "exitcode": self._exit_code, "err-data": base64.b64encode(b"no").decode()}
            case "guest-get-time":
                return self.time_ns
            case "guest-set-time":
                self.time_ns = fields["time"]
        return {}


async def test_a_fork_gets_the_hosts_time_its_own_id_and_fresh_entropy() -> None:
    seeds = []
    for machine_id in ("desktop-1", "desktop-2"):
        guest, before_s = ScriptedGuest(), time.time()
        await renew_identity(GuestAgent(guest), machine_id=machine_id, windows=False)
        assert guest.files["/etc/machine-id"] == f"{guest_machine_id(machine_id)}\n".encode()
        ((*command, moment),) = guest.ran
        assert command == ["/bin/date", "-u", "-s"]
        assert before_s - 1 <= float(moment.removeprefix("@")) <= time.time() + 1
        seeds.append(guest.files["/dev/urandom"])
    assert len({len(seed) for seed in seeds} | {64}) == 1
    assert seeds[0] != seeds[1]


def test_equal_machines_have_equal_guest_ids_and_others_do_not() -> None:
    assert guest_machine_id("a") == guest_machine_id("a") != guest_machine_id("b")
    assert len(guest_machine_id("a")) == 32


async def test_a_fork_whose_clock_cannot_be_set_raises_an_error_with_the_guests_message() -> None:
    with pytest.raises(GuestError, match=r"m-9: .*clock .*exit 1.*: no"):
        await renew_identity(GuestAgent(ScriptedGuest(exit_code=1)), machine_id="m-9", windows=False)


async def test_a_fork_that_has_the_hosts_clock_needs_not_set_it() -> None:
    guest = ScriptedGuest(exit_code=1)
    guest.time_ns = time.time_ns()
    await renew_identity(GuestAgent(guest), machine_id="m-9", windows=False)
    assert guest.asked[-1] == "guest-get-time"


async def test_in_a_windows_guest_only_the_clock_is_set() -> None:
    guest, before_ns = ScriptedGuest(), time.time_ns()
    await renew_identity(GuestAgent(guest), machine_id="m-9", windows=True)
    assert guest.asked == ["guest-set-time"]
    assert before_ns <= guest.time_ns <= time.time_ns()
