"""A query that is cut, late or partial gives no score, whatever its checker would make of the rest."""

from typing import Any

import pytest
from PIL import Image

from cuaenv.actions import Done
from cuaenv.results import CommandResult
from envd.base.errors import EvaluatorFailed, GuestError, GuestUnresponsive
from envd.desktop.observation import EncodedFrame, Observation
from envd.tasks.checkers.images import read_pixels
from envd.tasks.evaluate import evaluate
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
        with pytest.raises(EvaluatorFailed, match=rf"task s/t: check '.+' failed: .*{problem}"):
            await evaluated(desktop, checker, os=os)


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


@pytest.mark.parametrize(
    ("checker", "data"),
    [
        ({"kind": "file_text", "equals": "right"}, b"right"),
        ({"kind": "file_bytes", "base64": "AAAA"}, b"\0\0\0"),
        ({"kind": "json_value", "equals": 123}, b"123"),
        ({"kind": "csv_value", "row": 0, "column": "a", "absent": True}, b"a\n1\n"),
        ({"kind": "ini_value", "key": "a", "absent": True}, b"b=\na=1"),
        ({"kind": "xml_value", "at": "/a", "equals": "1"}, b"<a>1</a>"),
        ({"kind": "image_like", "guest_path": "/home/user/b.png"}, b"picture"),
        ({"kind": "exact_match", "text": "right"}, b"right"),
    ],
)
async def test_part_of_a_file_gives_no_score(checker: dict[str, Any], data: bytes) -> None:
    checker = {**checker, "path": PATH}
    await assert_no_score(checker, "sh", "-c")
    desktop = PartialDesktop()
    desktop.files[PATH] = data
    with pytest.raises(EvaluatorFailed, match=rf"{PATH}: read 2 of {len(data)} bytes; the file keeps changing"):
        await evaluated(desktop, checker)


@pytest.mark.parametrize(
    ("checker", "words"),
    [
        ({"kind": "file_absent", "path": PATH}, "sh -c"),
        ({"kind": "directory", "path": "/home/user", "entries": [], "mode": "exactly"}, "sh -c"),
        ({"kind": "window", "window": {"title": "x"}, "present": False}, "wmctrl"),
        ({"kind": "process", "program": "x", "running": False}, "ps"),
        ({"kind": "clipboard", "equals": "x"}, "xclip"),
        ({"kind": "command", "argv": ["sync"], "exit_code": 1}, "sync"),
        ({"kind": "registry", "key": "HKEY_LOCAL_MACHINE\\Software", "absent": True}, "powershell.exe"),
    ],
)
async def test_a_query_that_is_cut_or_late_gives_no_score(checker: dict[str, Any], words: str) -> None:
    os = "windows" if words == "powershell.exe" else "linux"
    await assert_no_score(checker, *words.split(), os=os)


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


async def test_an_observation_without_the_requested_tree_gives_no_score() -> None:
    class Blind(MemoryDesktop):
        async def observe(self, *_: object, **__: object) -> Observation:
            return Observation(frame=EncodedFrame.__new__(EncodedFrame))

    with pytest.raises(EvaluatorFailed, match="accessibility tree"):
        await evaluated(Blind(), {"kind": "on_screen", "named": "x", "present": False})
