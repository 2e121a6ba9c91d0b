"""What a check of `envd doctor` finds, and the checks of programs and directories."""

import subprocess
from pathlib import Path

import pytest

from envd.base.checks import HostCheck, Status, check_disk, check_tool

GIB = 1 << 30


def missing_tool(*, needed: bool) -> HostCheck:
    return check_tool("no-such-tool", package="tools", purpose="for x", needed=needed)


def test_a_missing_required_tool_or_one_that_does_not_run_fails() -> None:
    assert missing_tool(needed=True).status is Status.FAIL
    assert missing_tool(needed=False).status is Status.WARN

    def version_of(path: str) -> str:
        raise subprocess.CalledProcessError(127, path)

    check = check_tool("sh", package="dash", purpose="", version_of=version_of)
    assert check.status is Status.FAIL
    assert "does not run" in check.detail


@pytest.mark.parametrize(("user_id", "sudo"), [(0, ""), (1000, "sudo ")])
def test_a_fix_for_root_says_sudo_to_other_users(monkeypatch: pytest.MonkeyPatch, user_id: int, sudo: str) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user_id)
    assert missing_tool(needed=True).fix == f"`make deps`, or `{sudo}apt-get install tools`"


@pytest.mark.parametrize(
    ("free_bytes", "writable", "reserve_bytes", "status"),
    [
        (20 * GIB, True, 0, Status.OK),
        (4 * GIB, True, 0, Status.WARN),
        (0, True, 0, Status.FAIL),
        (20 * GIB, False, 0, Status.FAIL),
        (9 * GIB, True, 10 * GIB, Status.FAIL),
    ],
)
def test_a_directory_needs_free_space_and_write_permission(
    free_bytes: int, writable: bool, reserve_bytes: int, status: Status
) -> None:
    check = check_disk("d", Path("/x"), free_bytes=free_bytes, writable=writable, reserve_bytes=reserve_bytes)
    assert check.status is status
