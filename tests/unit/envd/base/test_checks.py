"""What a check of `envd doctor` finds, and the checks of programs and directories."""

import subprocess
from pathlib import Path

import pytest

from envd.base.checks import HostCheck, Status, check_disk, check_tool

GIB = 1 << 30


def missing_tool(*, needed: bool) -> HostCheck:
    return check_tool("no-such-tool", package="tools", purpose="for x", needed=needed)


def test_a_missing_required_tool_fails_and_names_its_package() -> None:
    assert missing_tool(needed=True).status is Status.FAIL
    assert missing_tool(needed=False).status is Status.WARN


@pytest.mark.parametrize(("user_id", "sudo"), [(0, ""), (1000, "sudo ")])
def test_a_fix_for_root_says_sudo_to_other_users(monkeypatch: pytest.MonkeyPatch, user_id: int, sudo: str) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user_id)
    assert missing_tool(needed=True).fix == f"`make deps`, or `{sudo}apt-get install tools`"


def test_a_tool_that_does_not_run_fails() -> None:
    def version_of(path: str) -> str:
        raise subprocess.CalledProcessError(127, path)

    check = check_tool("sh", package="dash", purpose="", version_of=version_of)
    assert check.status is Status.FAIL
    assert "does not run" in check.detail


@pytest.mark.parametrize(
    ("free_bytes", "writable", "status"),
    [(20 * GIB, True, Status.OK), (4 * GIB, True, Status.WARN), (0, True, Status.FAIL), (20 * GIB, False, Status.FAIL)],
)
def test_a_directory_needs_free_space_and_write_permission(free_bytes: int, writable: bool, status: Status) -> None:
    assert check_disk("state_dir", Path("/x"), free_bytes=free_bytes, writable=writable).status is status


def test_less_free_disk_than_the_reserve_is_a_failure() -> None:
    check = check_disk("state_dir", Path("/x"), free_bytes=9 << 30, writable=True, reserve_bytes=10 << 30)
    assert check.status is Status.FAIL
