"""Pictures, the clipboard, the screen and the Windows registry: queries to the guest, and scores of the responses."""

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from cuaenv.actions import Done
from cuaenv.region import Region
from cuaenv.results import CommandResult
from envd.base.errors import EvaluatorFailed, GuestError
from envd.desktop.a11y import MAX_VALUE_CHARS
from envd.desktop.observation import A11yElement, A11yElements
from envd.tasks.checkers.images import MAX_PIXELS, read_pixels
from envd.tasks.checkers.session import AgentAnswer, OnScreen, judge_answer, judge_screen
from envd.tasks.evaluate import evaluate
from envd.tasks.model import Task
from envd.tasks.text import CheckOutcome
from tests.support.memory_desktop import MemoryDesktop

PATH = "/home/user/a.png"


@pytest.mark.parametrize(
    ("fields", "right", "hedged"),
    [
        (
            {"contains": "42"},
            ["42", "The answer is 42.", "It is 42!", "**42.**", 'It is "42."', "42...", "item-42", "42\u00a0%"],
            [
                *("42 or 43", "142", "41, 42, 43", "42 43", "42/43", "42. Or 43.", "It is 42 and not 41", "42\n43"),
                *("-42", "It is −42", "≠ 42", "> 42", "42 ½", "42\u200b0", "42 \uff14\uff13", "isn't 42", "never 42"),
            ],
        ),
        (
            {"contains": "green", "case": "ignore"},
            ["Green", "It is green."],
            [
                *("red, green, blue", "green or red", "evergreen", "not green", "Either green", "cannot be green"),
                *(
                    "red\rgreen",
                    "red\u2028green",
                    "red、green",
                    "green \uff0f red",
                    "green o\u200br red",
                    "green & red",
                ),
                *("green。red", "green\u0336 red", "isn’t green"),
            ],
        ),
        ({"matches": r".*\b42\b.*"}, ["42", "the answer: 42"], ["42 or 43", "41, 42", "It is 42. It is 43.", "42 43"]),
        ({"matches": r".*120\D+90.*"}, ["it is 120x90"], ["120 90 91", "12 120 90"]),
        ({"matches": r"120\s*[x,]\s*90"}, ["120, 90", "120x90"], ["120x90 or 90x120"]),
        ({"equals": "a, b or c"}, ["a, b or c"], ["a", "a, b or c, or d"]),
    ],
)
def test_a_hedged_answer_counts_only_if_accepted(fields: dict[str, str], right: list[str], hedged: list[str]) -> None:
    def scores(answers: list[str], **more: str) -> list[float]:
        checker = AgentAnswer.model_validate({"kind": "answer", **fields, **more})
        return [judge_answer(Done(answer), checker).score for answer in answers]

    assert scores(right) == [1.0] * len(right)
    assert scores(hedged) == [0.0] * len(hedged)
    if "contains" in fields:
        assert scores(hedged, hedged="accept") == [1.0] * len(hedged)


async def test_an_answer_is_judged_by_the_judge_as_all_that_an_agent_makes() -> None:
    """A pattern can take hours for a long answer: the daemon's own process must not match it."""
    judged: list[Any] = []

    async def judge(function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
        judged.append((function, *arguments))
        return function(*arguments)

    checker = {"kind": "answer", "equals": "42"}
    task = Task.model_validate({"task_id": "s/t", "instruction": "i", "level": 1, "checker": checker})
    evaluation = await evaluate(task, MemoryDesktop(), last_action=Done("42"), timeout_s=60.0, judge=judge)
    assert (evaluation.score, judged) == (1.0, [(judge_answer, Done("42"), task.checker)])


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30), *, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return file.getvalue()


async def score(desktop: MemoryDesktop, checker: dict[str, Any], **fields: Any) -> tuple[float, str]:
    task = Task.model_validate({"task_id": "s/t", "instruction": "i", "level": 1, "checker": checker, **fields})
    evaluation = await evaluate(task, desktop, last_action=None, timeout_s=60.0)
    return evaluation.score, evaluation.checks[0].evidence


RED = {"kind": "image_like", "path": PATH, "base64": base64.b64encode(picture((200, 0, 0))).decode()}


@pytest.mark.parametrize(
    ("data", "expected", "words"),
    [
        (picture((200, 0, 0)), 1.0, "similarity 1.0000"),
        (picture((200, 0, 0), form="BMP"), 1.0, "similarity 1.0000"),
        (picture((203, 1, 2)), 1.0, "similarity 0.99"),
        (picture((0, 0, 200)), 0.0, "similarity 0.47"),
        (picture((200, 0, 0), (30, 40)), 0.0, "30x40 pixels, expected 40x30"),
        (b"not a picture", 0.0, "not a picture"),
        (picture((200, 0, 0))[:60], 0.0, "not a picture"),
    ],
)
async def test_a_picture_is_compared_by_its_pixels(data: bytes, expected: float, words: str) -> None:
    desktop = MemoryDesktop()
    desktop.files[PATH] = data
    found, evidence = await score(desktop, RED)
    assert found == expected
    assert words in evidence


async def test_a_picture_is_compared_with_another_one_in_the_guest(desktop: MemoryDesktop) -> None:
    checker = {"kind": "image_like", "path": PATH, "guest_path": "/home/user/b.png"}
    desktop.files[PATH] = picture((1, 2, 3))
    assert await score(desktop, checker) == (0.0, "/home/user/b.png: no such file")
    desktop.files["/home/user/b.png"] = picture((1, 2, 3))
    assert (await score(desktop, checker))[0] == 1.0


def test_a_decompression_bomb_is_not_decoded() -> None:
    side = 5000
    assert side * side > MAX_PIXELS
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    assert len(file.getvalue()) < 10_000
    assert "exceed the limit" in str(read_pixels(file.getvalue()))


def test_a_reference_that_is_not_a_picture_is_rejected() -> None:
    checker = {**RED, "base64": base64.b64encode(b"x").decode()}
    with pytest.raises(ValidationError, match="picture"):
        Task.model_validate({"task_id": "s/t", "instruction": "i", "level": 1, "checker": checker})


async def test_the_clipboard_is_read_in_the_session(desktop: MemoryDesktop) -> None:
    checker = {"kind": "clipboard", "equals": "漢字"}
    assert await score(desktop, checker) == (0.0, "no text is on the clipboard")
    await desktop.run(["xclip"], timeout_s=60.0, stdin="漢字\n".encode())
    assert (await score(desktop, checker))[0] == 1.0
    desktop.answers["xclip",] = CommandResult(exit_code=1, stdout=b"", stderr=b"Error: target STRING not available")
    assert (await score(desktop, checker))[0] == 0.0


async def test_a_clipboard_that_cannot_be_read_gives_no_score(desktop: MemoryDesktop) -> None:
    desktop.answers["xclip",] = CommandResult(exit_code=1, stdout=b"", stderr=b"Error: Can't open display: :0")
    with pytest.raises(EvaluatorFailed, match=r"exit code 1: .*Can't open display"):
        await score(desktop, {"kind": "clipboard", "equals": "x"})


async def test_an_empty_clipboard_is_never_right() -> None:
    with pytest.raises(ValidationError, match="clipboard"):
        await score(MemoryDesktop(), {"kind": "clipboard", "matches": ".*"})


def on_screen(*elements: A11yElement, **more: Any) -> A11yElements:
    return A11yElements(items=elements, **more)


def element(role: str, name: str, *states: str, value: str = "") -> A11yElement:
    box = Region(x_px=0, y_px=0, width_px=9, height_px=9)
    return A11yElement(role=role, name=name, value=value, states=states, box=box, depth=1)


WRAP = element("check-box", "Word wrap", "checked")
FONT = element("spin-button", "Font size", value="14")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"named": "^Word"}, 1.0),
        ({"role": "check-box", "states": ["checked"]}, 1.0),
        ({"role": "check", "states": ["checked"]}, 0.0),
        ({"named": "^wrap"}, 0.0),
        ({"named": "Word", "states": ["focused"]}, 0.0),
        ({"named": "Font", "value": "^14$"}, 1.0),
        ({"named": "Word", "value": "14"}, 0.0),
        ({"named": "Word", "present": False}, 0.0),
        ({"named": "Gone", "present": False}, 1.0),
    ],
)
def test_an_element_must_match_all_given_fields(fields: dict[str, Any], expected: float) -> None:
    checker = OnScreen.model_validate({"kind": "on_screen", **fields})
    assert judge_screen(on_screen(WRAP, FONT), checker).score == expected


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("more", [{"is_cut": True}, {"left_out_count": 3}])
def test_an_incomplete_element_list_gives_no_score_unless_it_has_the_element(
    more: dict[str, Any], present: bool
) -> None:
    checker = OnScreen.model_validate({"kind": "on_screen", "named": "Gone", "present": present})
    with pytest.raises(GuestError, match="incomplete"):
        judge_screen(on_screen(WRAP, **more), checker)
    found = OnScreen.model_validate({"kind": "on_screen", "named": "Word"})
    assert judge_screen(on_screen(WRAP, **more), found).score == 1.0


@pytest.mark.parametrize("present", [True, False])
def test_a_text_that_is_cut_gives_no_score_unless_a_complete_one_matches(present: bool) -> None:
    long = replace(WRAP, value="x" * (MAX_VALUE_CHARS - 1) + "…")
    checker = OnScreen.model_validate({"kind": "on_screen", "value": "end$", "present": present})
    with pytest.raises(GuestError, match="check-box 'Word wrap'"):
        judge_screen(on_screen(long), checker)
    assert judge_screen(on_screen(long, replace(WRAP, value="the end")), checker).score == float(present)
    other = OnScreen.model_validate({"kind": "on_screen", "value": "end$", "role": "entry", "present": present})
    assert judge_screen(on_screen(long), other).score == float(not present)


def test_on_screen_requires_a_role_name_or_value() -> None:
    with pytest.raises(ValidationError, match="role, named, value"):
        OnScreen.model_validate({"kind": "on_screen", "states": ["checked"]})


KEY = "HKEY_CURRENT_USER\\Control Panel\\Desktop"


@pytest.mark.parametrize(
    ("response", "fields", "expected"),
    [
        (b'{"found":true,"value":"1"}', {"equals": 1}, 1.0),
        (b'{"found":true,"value":[1,2]}', {"equals": [1, 2]}, 1.0),
        (b'{"found":true,"value":0}', {"equals": 1}, 0.0),
        (b'{"found":false,"value":null}', {"equals": 1}, 0.0),
        (b'{"found":false,"value":null}', {"absent": True}, 1.0),
    ],
)
async def test_a_registry_value_is_scored(response: bytes, fields: dict[str, Any], expected: float) -> None:
    desktop = MemoryDesktop()
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=response + b"\r\n", stderr=b"")
    checker = {"kind": "registry", "key": KEY, "value": "User's", **fields}
    assert (await score(desktop, checker, os="windows"))[0] == expected
    script = desktop.ran[0][-1]
    assert "$hive = 'HKEY_CURRENT_USER'\n$key = 'Control Panel\\Desktop'\n$name = 'User''s'\n" in script


@pytest.mark.parametrize("response", [b"", b"[]", b'{"value": 1}', b"Access is denied."])
async def test_a_malformed_registry_response_gives_no_score(response: bytes, desktop: MemoryDesktop) -> None:
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=response, stderr=b"")
    with pytest.raises(EvaluatorFailed, match=r"^task .*registry"):
        await score(desktop, {"kind": "registry", "key": KEY, "equals": 1}, os="windows")


async def test_windows_files_and_processes_are_queried_with_powershell(desktop: MemoryDesktop) -> None:
    checker = {"kind": "file_text", "path": "C:\\a.txt", "equals": "right"}
    desktop.files["C:\\a.txt"] = b"right\r\n"
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"7\r\n", stderr=b"")
    assert (await score(desktop, checker, os="windows"))[0] == 1.0
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"absent\r\n", stderr=b"")
    assert (await score(desktop, checker, os="windows"))[0] == 0.0
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"R notepad\r\nR svchost\r\n", stderr=b"")
    assert (await score(desktop, {"kind": "process", "program": "notepad"}, os="windows"))[0] == 1.0
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"dWindows\0fa.txt\0", stderr=b"")
    entries = {"kind": "directory", "path": "C:\\data", "entries": ["Windows/", "a.txt"], "mode": "exactly"}
    assert (await score(desktop, entries, os="windows"))[0] == 1.0
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=b"??", stderr=b"")
    with pytest.raises(EvaluatorFailed, match="malformed"):
        await score(desktop, checker, os="windows")
