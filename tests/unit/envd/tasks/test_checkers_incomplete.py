"""A query that is cut, late or partial gives no score, whatever its checker would make of the rest."""

from typing import Any

import pytest
from cuaenv.actions import Done
from PIL import Image

from envd.base.errors import EvaluatorFailed, GuestError, GuestUnresponsive
from envd.guest.agent import CommandResult
from envd.guest.observation import EncodedFrame, Observation
from envd.tasks.checkers.evaluate import evaluate
from envd.tasks.checkers.images import read_pixels
from envd.tasks.model import Task
from tests.support.memory_desktop import MemoryDesktop

PATH = "/home/user/a.txt"
CUT = GuestError("guest-exec: its output exceeds the guest agent's limit")
LATE = GuestUnresponsive("no response within 30 s")


class PartialDesktop(MemoryDesktop):
    """Reads only the first bytes of files, as while a program writes them."""

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        data = await super().read_file(path, max_bytes=max_bytes)
        return data and data[:2]


async def evaluated(desktop: MemoryDesktop, checker: dict[str, Any], *, os: str = "linux") -> float:
    fields = {"task_id": "s/t", "instruction": "i", "level": 1, "checker": checker, "os": os}
    return (await evaluate(Task.model_validate(fields), desktop, last_action=Done(), timeout_s=60.0)).score


async def assert_no_score(checker: dict[str, Any], *words: str, os: str = "linux") -> None:
    """Assert that there is no score if the query that begins with `words` is cut or late."""
    for problem in (CUT, LATE):
        desktop = MemoryDesktop()
        desktop.answers[words] = problem
        with pytest.raises(EvaluatorFailed, match=str(problem)):
            await evaluated(desktop, checker, os=os)


async def assert_no_score_for_part_of_a_file(checker: dict[str, Any], data: bytes) -> None:
    """Assert that there is no score if only a part of a file can be read, or its size not at all."""
    await assert_no_score(checker, "sh", "-c")
    desktop = PartialDesktop()
    desktop.files[PATH] = data
    with pytest.raises(EvaluatorFailed, match=rf"{PATH}: read 2 of {len(data)} bytes; the file keeps changing"):
        await evaluated(desktop, checker)


class ReplacedDesktop(MemoryDesktop):
    """Files vanish between the query of their size and their reading, as while a program replaces them."""

    vanish_count = 1

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        self.vanish_count -= 1
        return None if self.vanish_count >= 0 else await super().read_file(path, max_bytes=max_bytes)


async def test_a_file_that_vanishes_while_it_is_read_is_read_again() -> None:
    checker = {"kind": "file_text", "path": PATH, "equals": "right"}
    desktop = ReplacedDesktop()
    desktop.files[PATH] = b"right"
    assert await evaluated(desktop, checker) == 1.0
    desktop.vanish_count = 3
    with pytest.raises(EvaluatorFailed, match="vanished"):
        await evaluated(desktop, checker)


async def test_part_of_a_text_file_gives_no_score() -> None:
    await assert_no_score_for_part_of_a_file({"kind": "file_text", "path": PATH, "equals": "right"}, b"right")


async def test_part_of_a_file_of_bytes_gives_no_score() -> None:
    await assert_no_score_for_part_of_a_file({"kind": "file_bytes", "path": PATH, "base64": "AAAA"}, b"\0\0\0")


async def test_part_of_a_json_file_gives_no_score() -> None:
    await assert_no_score_for_part_of_a_file({"kind": "json_value", "path": PATH, "equals": 123}, b"123")


async def test_part_of_a_csv_file_gives_no_score() -> None:
    checker = {"kind": "csv_value", "path": PATH, "row": 0, "column": "a", "absent": True}
    await assert_no_score_for_part_of_a_file(checker, b"a\n1\n")


async def test_part_of_an_ini_file_gives_no_score() -> None:
    await assert_no_score_for_part_of_a_file(
        {"kind": "ini_value", "path": PATH, "key": "a", "absent": True}, b"b=\na=1"
    )


async def test_part_of_an_xml_file_gives_no_score() -> None:
    await assert_no_score_for_part_of_a_file(
        {"kind": "xml_value", "path": PATH, "at": "/a", "equals": "1"}, b"<a>1</a>"
    )


async def test_part_of_a_picture_gives_no_score() -> None:
    checker = {"kind": "image_like", "path": PATH, "guest_path": "/home/user/b.png"}
    await assert_no_score_for_part_of_a_file(checker, b"picture")


async def test_part_of_a_graded_text_gives_no_score() -> None:
    await assert_no_score_for_part_of_a_file({"kind": "exact_match", "path": PATH, "text": "right"}, b"right")


async def test_an_unanswered_query_for_an_absent_file_gives_no_score() -> None:
    await assert_no_score({"kind": "file_absent", "path": PATH}, "sh", "-c")


async def test_a_cut_list_of_a_directory_gives_no_score() -> None:
    checker = {"kind": "directory", "path": "/home/user", "entries": [], "mode": "exactly"}
    await assert_no_score(checker, "sh", "-c")
    desktop = MemoryDesktop()
    desktop.answers["sh", "-c"] = CommandResult(exit_code=0, stdout=b"fa.t", stderr=b"")
    with pytest.raises(EvaluatorFailed, match="incomplete"):
        await evaluated(desktop, checker)


async def test_a_cut_list_of_windows_gives_no_score() -> None:
    await assert_no_score({"kind": "window", "window": {"title": "x"}, "present": False}, "wmctrl")


async def test_a_cut_list_of_processes_gives_no_score() -> None:
    await assert_no_score({"kind": "process", "program": "x", "running": False}, "ps")


async def test_a_cut_clipboard_gives_no_score() -> None:
    await assert_no_score({"kind": "clipboard", "equals": "x"}, "xclip")


async def test_a_command_that_is_cut_or_late_gives_no_score() -> None:
    await assert_no_score({"kind": "command", "argv": ["sync"], "exit_code": 1}, "sync")


@pytest.mark.parametrize("expected", [{"exit_code": 0}, {"exit_code": None, "stdout": {"equals": "x"}}])
async def test_a_killed_command_gives_no_score(expected: dict[str, Any], desktop: MemoryDesktop) -> None:
    desktop.answers["sync",] = CommandResult(exit_code=137, stdout=b"", stderr=b"")
    with pytest.raises(EvaluatorFailed, match="sync was killed"):
        await evaluated(desktop, {"kind": "command", "argv": ["sync"], **expected})
    assert await evaluated(desktop, {"kind": "command", "argv": ["sync"], "exit_code": 137}) == 1.0


async def test_a_picture_for_which_memory_is_missing_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        read_pixels(b"picture")


async def test_a_cut_response_of_the_registry_gives_no_score() -> None:
    checker = {"kind": "registry", "key": "HKEY_LOCAL_MACHINE\\Software", "absent": True}
    await assert_no_score(checker, "powershell.exe", os="windows")


async def test_an_observation_without_the_requested_tree_gives_no_score() -> None:
    class Blind(MemoryDesktop):
        async def observe(self, *_: object, **__: object) -> Observation:
            return Observation(frame=EncodedFrame.__new__(EncodedFrame))

    with pytest.raises(EvaluatorFailed, match="accessibility tree"):
        await evaluated(Blind(), {"kind": "on_screen", "named": "x", "present": False})
