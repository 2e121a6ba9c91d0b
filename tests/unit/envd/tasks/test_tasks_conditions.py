"""Conditions of oracles: their queries in each system, and when they hold."""

import pytest

from cuaenv.results import CommandResult
from envd.hypervisor.machine import GuestOs
from envd.tasks.oracle import WaitFor
from envd.tasks.replay import query_of, unmet

WINDOWS_LIST = b"0x00010164 0 explorer.CabinetWClass - Documents\r\n0x00010166 0 notepad.#32770 - Save as\r\n"


def condition(**fields: object) -> WaitFor:
    return WaitFor.model_validate(fields)


def problem(wanted: WaitFor, stdout: bytes, *, exit_code: int = 0, stderr: bytes = b"") -> str:
    return unmet(wanted, CommandResult(exit_code=exit_code, stdout=stdout, stderr=stderr))


@pytest.mark.parametrize(
    ("fields", "linux", "script"),
    [
        ({"window": {"title": "x"}}, "wmctrl", "list-windows"),
        ({"file": "C:\\a.txt"}, "sh", "probe"),
        ({"process": "notepad"}, "ps", "list-processes"),
    ],
)
def test_each_condition_has_a_query_in_each_system(fields: dict[str, object], linux: str, script: str) -> None:
    wanted = condition(**fields)
    assert query_of(wanted, GuestOs.LINUX).argv[0] == linux
    query = query_of(wanted, GuestOs.WINDOWS)
    assert query.as_root
    assert query.argv[-1].startswith(f"# envd: {script}\n")


def test_a_window_is_awaited_by_title_and_class() -> None:
    dialog = condition(window={"title": "(?i)^save as$", "class": r"notepad\.#32770"})
    assert problem(dialog, WINDOWS_LIST) == ""
    assert problem(condition(window={"class": r"calc"}), WINDOWS_LIST).startswith("open: 'Documents'")
    gone = condition(window={"title": "Save as"}, absent=True)
    assert "'Save as' (notepad.#32770)" in problem(gone, WINDOWS_LIST)
    assert problem(gone, b"") == ""


@pytest.mark.parametrize(("size", "is_there"), [("5", True), ("0", False), ("absent", False), ("other", True)])
def test_a_file_is_there_if_it_is_not_empty_or_a_directory(size: str, is_there: bool) -> None:
    output = f"{size}\r\n".encode()
    assert (problem(condition(file="C:\\a.txt"), output) == "") is is_there
    assert (problem(condition(file="C:\\a.txt", absent=True), output) == "") is not is_there


def test_a_process_is_awaited_by_its_whole_name() -> None:
    running = b"R notepad\r\nR svchost\r\n"
    assert problem(condition(process="notepad"), running) == ""
    assert problem(condition(process="note"), running) == "0 processes named note are running"
    assert problem(condition(process="notepad", absent=True), running) == "1 processes named notepad are running"


@pytest.mark.parametrize("absent", [False, True])
def test_a_query_that_fails_meets_no_condition(absent: bool) -> None:
    window = condition(window={"title": "x"}, absent=absent)
    assert problem(window, b"", exit_code=1, stderr=b"no user is logged in") == "exit code 1: 'no user is logged in'"
    assert "malformed list of windows" in problem(window, b"?")
    assert "the list of processes is empty" in problem(condition(process="x", absent=absent), b"")
