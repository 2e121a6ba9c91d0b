"""The effect of each setup verb, and how setups fail."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cuaenv.results import CommandResult
from envd.base.errors import GuestError, GuestUnresponsive, MachineLost, SetupFailed
from envd.hypervisor.machine import GuestOs
from envd.tasks.assets import AssetCache
from envd.tasks.model import Task
from envd.tasks.queries import OpenWindow
from envd.tasks.setup import run_setup
from envd.tasks.setup_resources import SetupResources
from envd.tasks.text import CheckOutcome
from tests.support.memory_desktop import MemoryDesktop

EDITOR = OpenWindow(window_id="0x00000060", wm_class="mousepad.Mousepad", title="~/a.txt - Mousepad")
CALCULATOR = OpenWindow(window_id="0x00000070", wm_class="galculator.Galculator", title="galculator")
PATH = "/home/user/a.txt"
WRITE = {"kind": "write_file", "path": PATH, "text": "x"}
WITH_PASSWORD = SetupResources(client_password="s3cret")  # noqa: S106 - of no guest


def task(*setup: dict[str, Any], checker: dict[str, Any] | None = None) -> Task:
    checker = checker or {"kind": "answer", "equals": "done"}
    return Task.model_validate(
        {"task_id": "s/t", "instruction": "Do it.", "level": 1, "setup": setup, "checker": checker}
    )


UNSOLVED = task(WRITE, checker={"kind": "file_text", "path": PATH, "equals": "y"})


async def run(
    desktop: MemoryDesktop, *setup: dict[str, Any], timeout_s: float = 5.0, resources: SetupResources | None = None
) -> None:
    await run_setup(task(*setup), desktop, timeout_s=timeout_s, resources=resources or SetupResources(), poll_s=0.001)


async def test_write_file_writes_bytes_in_the_declared_encoding_and_newlines(desktop: MemoryDesktop) -> None:
    verb = {"kind": "write_file", "path": PATH}
    await run(desktop, {**verb, "text": "é\nb\n"})
    assert desktop.files[PATH] == b"\xc3\xa9\nb\n"
    await run(desktop, {**verb, "text": "é\nb\n", "encoding": "utf-8-sig", "newline": "crlf"})
    assert desktop.files[PATH] == b"\xef\xbb\xbf\xc3\xa9\r\nb\r\n"
    await run(desktop, {**verb, "base64": "AP8="})
    assert desktop.files[PATH] == b"\x00\xff"


async def test_a_setup_ends_when_the_guest_is_idle(desktop: MemoryDesktop) -> None:
    await run(desktop, WRITE)
    assert desktop.rests == 1
    with pytest.raises(SetupFailed):
        await run(desktop, {"kind": "execute", "argv": ["false"]})
    assert desktop.rests == 1


@pytest.mark.parametrize(
    ("checker", "is_checked"),
    [
        ({"kind": "file_text", "path": PATH, "equals": "x"}, True),
        (
            {"kind": "any", "checks": [{"kind": "file_absent", "path": PATH}, {"kind": "file_absent", "path": "/b"}]},
            True,
        ),
        ({"kind": "file_text", "path": PATH, "equals": "y"}, False),
        ({"kind": "command", "argv": ["true"]}, False),
    ],
)
async def test_a_start_that_is_already_solved_fails_the_setup(checker: dict[str, Any], is_checked: bool) -> None:
    desktop, solved = MemoryDesktop(), task(WRITE, checker=checker)
    if not is_checked:
        await run_setup(solved, desktop, timeout_s=60.0)
        return
    with pytest.raises(SetupFailed, match=r"^task s/t: already solved"):
        await run_setup(solved, desktop, timeout_s=60.0)


async def test_the_start_is_judged_where_the_resources_say() -> None:
    judged: list[str] = []

    async def judge(function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
        judged.append(function.__name__)
        return CheckOutcome(1.0, "judged")

    with pytest.raises(SetupFailed, match="judged"):
        await run_setup(UNSOLVED, MemoryDesktop(), timeout_s=60.0, resources=SetupResources(judge=judge))
    assert judged == ["judge_file_text"]


async def test_a_start_that_cannot_be_checked_is_used(caplog: pytest.LogCaptureFixture, desktop: MemoryDesktop) -> None:
    desktop.answers["sh", "-c"] = CommandResult(exit_code=1, stdout=b"", stderr=b"no shell")
    await run_setup(UNSOLVED, desktop, timeout_s=60.0)
    assert "its start could not be checked" in caplog.text


async def test_directories_and_files_are_made_and_removed_in_order(desktop: MemoryDesktop) -> None:
    await run(
        desktop,
        {"kind": "make_directory", "path": "/home/user/d/e"},
        {"kind": "write_file", "path": "/home/user/d/e/f.txt", "text": "x"},
        {"kind": "remove", "path": "/home/user/d/e"},
    )
    assert desktop.files.is_directory("/home/user/d")
    assert not desktop.files.is_directory("/home/user/d/e")


async def test_open_starts_the_program_and_waits_for_the_window_that_shows_the_file(desktop: MemoryDesktop) -> None:
    desktop.opens["mousepad", PATH] = EDITOR
    await run(desktop, {"kind": "open", "path": PATH})
    assert desktop.launched == [("mousepad", PATH)]
    assert desktop.windows == [EDITOR]


async def test_launch_is_skipped_if_the_window_is_open_and_activate_raises_one(desktop: MemoryDesktop) -> None:
    desktop.windows = [CALCULATOR]
    await run(desktop, {"kind": "launch", "argv": ["galculator"], "window": {"class": "galculator"}})
    assert desktop.launched == []
    desktop.windows = [EDITOR, CALCULATOR]
    await run(desktop, {"kind": "activate_window", "window": {"class": "Mousepad"}})
    assert desktop.windows == [CALCULATOR, EDITOR]


async def test_wait_window_returns_when_the_window_appears(desktop: MemoryDesktop) -> None:
    asyncio.get_running_loop().call_later(0.02, desktop.windows.append, EDITOR)
    await run(desktop, {"kind": "wait_window", "window": {"title": r"a\.txt"}})
    assert desktop.windows == [EDITOR]
    assert len(desktop.ran) > 1


async def test_execute_expects_its_exit_code(desktop: MemoryDesktop) -> None:
    await run(desktop, {"kind": "execute", "argv": ["false"], "expect_exit_code": 1})
    with pytest.raises(SetupFailed, match=r"s/t: setup\[1\] execute .*false: exit code 1"):
        await run(desktop, {"kind": "execute", "argv": ["true"]}, {"kind": "execute", "argv": ["false"]})
    await run(MemoryDesktop(), {"kind": "execute", "argv": ["false"], "expect_exit_code": None})
    with pytest.raises(SetupFailed):
        await run(desktop, {"kind": "execute", "argv": ["false"]}, WRITE)
    assert PATH not in desktop.files


@pytest.mark.parametrize(
    "until", [{"exit_code": 0}, {"stdout": "up"}, {"stderr": "warm"}, {"exit_code": 9, "stdout": "up"}]
)
async def test_a_command_is_repeated_until_its_condition_holds(until: dict[str, Any], desktop: MemoryDesktop) -> None:
    desktop.answers["probe",] = CommandResult(exit_code=1, stdout=b"down", stderr=b"cold")

    def become_ready() -> None:
        desktop.answers["probe",] = CommandResult(exit_code=0, stdout=b"is up", stderr=b"warm now")

    asyncio.get_running_loop().call_later(0.02, become_ready)
    await run(desktop, {"kind": "wait_command", "argv": ["probe"], **until})
    assert len(desktop.ran) > 1


async def test_a_condition_that_never_holds_reports_the_last_output(desktop: MemoryDesktop) -> None:
    desktop.answers["probe",] = CommandResult(exit_code=3, stdout=b"still down", stderr=b"")
    with pytest.raises(SetupFailed, match=r"0\.02 s .*probe.* 3: still down"):
        await run(desktop, {"kind": "wait_command", "argv": ["probe"], "exit_code": 0, "timeout_s": 0.02})


async def test_close_window_closes_a_window_and_accepts_a_missing_one(desktop: MemoryDesktop) -> None:
    desktop.windows = [EDITOR, CALCULATOR]
    verb = {"kind": "close_window", "window": {"class": "galculator"}}
    await run(desktop, verb)
    assert desktop.windows == [EDITOR]
    await run(desktop, verb)
    assert desktop.windows == [EDITOR]


async def test_a_window_that_does_not_close_fails_the_setup(desktop: MemoryDesktop) -> None:
    desktop.windows = [EDITOR]
    desktop.answers["wmctrl", "-i", "-c"] = CommandResult(exit_code=0, stdout=b"", stderr=b"")
    with pytest.raises(SetupFailed, match="to close"):
        await run(desktop, {"kind": "close_window", "window": {"title": "Mousepad"}, "timeout_s": 0.05})


async def test_the_wallpaper_must_be_a_file_and_the_clipboard_gets_its_text(desktop: MemoryDesktop) -> None:
    verb = {"kind": "change_wallpaper", "path": "/home/user/sky.png"}
    with pytest.raises(SetupFailed, match="File not found"):
        await run(desktop, verb)
    desktop.files["/home/user/sky.png"] = b"png"
    await run(desktop, verb)
    assert desktop.wallpaper == "/home/user/sky.png"
    await run(desktop, {"kind": "set_clipboard", "text": "漢字"})
    assert (await desktop.run(["xclip", "-o"], timeout_s=60.0)).stdout == "漢字".encode()


async def test_files_that_come_with_the_tasks_are_copied_into_the_guest(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"\x00\xff")
    desktop = MemoryDesktop()
    verb = {"kind": "upload_file", "files": [{"local_path": str(tmp_path / "notes.txt"), "path": PATH}]}
    await run(desktop, verb)
    assert desktop.files[PATH] == b"\x00\xff"
    (tmp_path / "notes.txt").unlink()
    with pytest.raises(SetupFailed, match="No such file"):
        await run(desktop, verb)


async def test_a_missing_asset_fails_the_setup_and_names_the_fetch_command(tmp_path: Path) -> None:
    verb = {"kind": "download", "files": [{"url": "https://files.example.org/a.txt", "path": PATH}]}
    with pytest.raises(SetupFailed, match=r"download .*/a\.txt: .*envd tasks fetch"):
        await run(MemoryDesktop(), verb, resources=SetupResources(assets=AssetCache(tmp_path)))


async def test_placeholders_are_replaced_and_errors_hide_the_password(desktop: MemoryDesktop) -> None:
    words = "{CLIENT_PASSWORD} {SCREEN_WIDTH}x{SCREEN_HEIGHT} {SCREEN_WIDTH_HALF},{SCREEN_HEIGHT_HALF} {HOME}"
    verb = {"kind": "execute", "argv": ["echo", words]}
    await run(desktop, verb, resources=WITH_PASSWORD)
    assert desktop.ran == [("echo", "s3cret 1280x800 640,400 {HOME}")]
    with pytest.raises(SetupFailed, match=r"tasks\.client_password_file"):
        await run(desktop, verb)
    verb = {"kind": "execute", "argv": ["false", "{CLIENT_PASSWORD}"]}
    with pytest.raises(SetupFailed, match=r"false \{CLIENT_PASSWORD\}: exit code 1") as raised:
        await run(MemoryDesktop(), verb, resources=WITH_PASSWORD)
    assert "s3cret" not in str(raised.value) + repr(WITH_PASSWORD)


async def test_windows_directories_are_created_and_removed_with_powershell(desktop: MemoryDesktop) -> None:
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"", stderr=b"")
    path = "C:\\Users\\it's me\\notes"
    setup = [
        {"kind": "make_directory", "path": path},
        {"kind": "remove", "path": path},
        {"kind": "write_file", "path": f"{path}\\a.txt", "text": "x"},
    ]
    await run_setup(task(*setup).model_copy(update={"os": GuestOs.WINDOWS}), desktop, timeout_s=60.0)
    assert all("'C:\\Users\\it''s me\\notes" in argv[-1] for argv in desktop.ran)
    assert [word for argv in desktop.ran for word in ("New-Item", "Remove-Item") if word in argv[-1]] == [
        "New-Item",
        "Remove-Item",
        "New-Item",
    ]
    assert desktop.files[f"{path}\\a.txt"] == b"x"


async def test_execute_is_skipped_if_its_guard_succeeds(desktop: MemoryDesktop) -> None:
    verb = {"kind": "execute", "argv": ["sh", "-c", f"echo more >> {PATH}"], "unless": ["test", "-f", PATH]}
    await run(desktop, verb)
    await run(desktop, verb)
    assert desktop.files[PATH] == b"more\n"


async def test_the_error_of_a_failed_command_contains_its_output(desktop: MemoryDesktop) -> None:
    desktop.answers["mkdir",] = CommandResult(exit_code=1, stdout=b"", stderr=b"mkdir: Permission denied\n")
    with pytest.raises(SetupFailed, match="Permission denied"):
        await run(desktop, {"kind": "make_directory", "path": "/root/x"})


async def test_an_unresponsive_guest_fails_the_setup(desktop: MemoryDesktop) -> None:
    error = GuestUnresponsive("no answer in 5 s")
    desktop.answers["wmctrl",] = error
    with pytest.raises(SetupFailed, match=r"setup\[0\] open .*no answer in 5 s") as raised:
        await run(desktop, {"kind": "open", "path": PATH})
    assert raised.value.__cause__ is error


async def test_a_setup_waits_for_a_starting_window_manager(desktop: MemoryDesktop) -> None:
    desktop.opens["mousepad", PATH] = EDITOR
    desktop.answers["wmctrl",] = CommandResult(exit_code=1, stdout=b"", stderr=b"Cannot get client list properties.")
    asyncio.get_running_loop().call_later(0.02, desktop.answers.clear)
    await run(desktop, {"kind": "open", "path": PATH})
    assert desktop.windows == [EDITOR]


async def test_a_window_manager_that_never_answers_fails_the_setup(desktop: MemoryDesktop) -> None:
    desktop.answers["wmctrl",] = GuestError("no wmctrl")
    with pytest.raises(SetupFailed, match=r"0\.02 s .*no wmctrl"):
        await run(desktop, {"kind": "open", "path": PATH, "timeout_s": 0.02})


async def test_a_window_that_never_opens_fails_the_setup_and_lists_the_open_ones(desktop: MemoryDesktop) -> None:
    desktop.windows = [CALCULATOR]
    expected = r"setup\[0\] open exceeded its limit of 1 s waiting for a window with title .* open now: 'galculator'"
    with pytest.raises(SetupFailed, match=expected):
        await run(desktop, {"kind": "open", "path": PATH, "timeout_s": 1})


async def test_the_whole_setup_and_each_command_have_a_limit(desktop: MemoryDesktop) -> None:
    with pytest.raises(SetupFailed, match=r"setup\[1\] wait_window .*setup.* 1 s"):
        await run(
            desktop,
            {"kind": "execute", "argv": ["true"]},
            {"kind": "wait_window", "window": {"title": "x"}},
            timeout_s=1.0,
        )

    class Hanging(MemoryDesktop):
        async def run(self, argv: Sequence[str], **_: object) -> CommandResult:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(SetupFailed, match=r"setup\[0\] execute .*0\.02 s"):
        await run(Hanging(), {"kind": "execute", "argv": ["sleep", "60"], "timeout_s": 0.02})


async def test_a_lost_machine_stays_a_lost_machine_during_setup(desktop: MemoryDesktop) -> None:
    desktop.answers["mkdir",] = MachineLost("qemu exited")
    with pytest.raises(MachineLost):
        await run(desktop, {"kind": "make_directory", "path": "/home/user/d"})
