"""The scores of each checker, and the cases without a score."""

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from cuaenv.actions import Done, Fail
from cuaenv.results import CommandResult
from envd.base.errors import EvaluatorFailed, GuestError, MachineLost, TooLarge
from envd.tasks.checker_union import AnyLeafChecker
from envd.tasks.checkers.base import GuestInspector, LeafChecker
from envd.tasks.checkers.programs import ProcessRunning, WindowPresent, judge_processes, judge_windows
from envd.tasks.evaluate import evaluate, judge_ended
from envd.tasks.model import Task
from envd.tasks.queries import OpenWindow, parse_windows
from envd.tasks.text import CheckOutcome, ScoreResult
from tests.support.memory_desktop import MemoryDesktop

PATH = "/home/user/a.txt"
TEXT = {"kind": "file_text", "path": PATH, "equals": "right"}


def task(checker: dict[str, Any] | None, **fields: Any) -> Task:
    return Task.model_validate({"task_id": "s/t", "instruction": "Do it.", "level": 1, "checker": checker, **fields})


async def score_of(
    checker: dict[str, Any] | None, desktop: MemoryDesktop, *, last_action: Done | Fail | None = None, **fields: Any
) -> ScoreResult:
    return await evaluate(task(checker, **fields), desktop, last_action=last_action, timeout_s=60.0)


def desktop_with(**files: bytes) -> MemoryDesktop:
    desktop = MemoryDesktop()
    desktop.files.update({f"/home/user/{name}.txt": data for name, data in files.items()})
    return desktop


async def test_a_right_file_scores_one_and_the_check_is_named_after_it() -> None:
    evaluation = await score_of(TEXT, desktop_with(a=b"right\n"))
    assert evaluation.score == 1.0
    assert [check.name for check in evaluation.checks] == [f"file_text {PATH}"]


async def test_only_what_asks_the_session_is_checked_before_it_is_frozen() -> None:
    """Whatever the order of the checks, and results keep that order."""
    desktop = desktop_with(a=b"right")
    checks: list[dict[str, Any]] = [
        TEXT,
        {"kind": "command", "argv": ["cat", PATH], "stdout": {"equals": "right"}},
        {"kind": "command", "argv": ["echo", "session"], "in_session": True},
        {"kind": "clipboard", "equals": "x"},
        {"kind": "window", "window": {"title": "x"}},
        {"kind": "process", "program": "qemu-ga"},
    ]
    evaluation = await score_of({"kind": "all", "checks": checks}, desktop)
    assert [check.name.split()[0] for check in evaluation.checks] == [check["kind"] for check in checks]
    assert [check.score for check in evaluation.checks] == [1, 1, 1, 0, 0, 1]
    assert [argv[0] for argv in desktop.ran_frozen] == ["sh", "cat", "ps"]
    assert [argv[0] for argv in desktop.ran if argv not in desktop.ran_frozen] == ["echo", "xclip", "wmctrl"]
    assert not desktop.is_frozen


@pytest.mark.parametrize("checker", [{"kind": "answer", "equals": "42"}, {"kind": "window", "window": {"title": "x"}}])
async def test_nothing_is_frozen_if_nothing_but_the_session_is_asked(checker: dict[str, Any]) -> None:
    desktop = MemoryDesktop(can_freeze=False)
    assert (await score_of(checker, desktop)).score == 0


async def test_a_session_that_cannot_be_frozen_gives_no_score() -> None:
    with pytest.raises(EvaluatorFailed, match="could not be stopped: a process does not stop"):
        await score_of(TEXT, MemoryDesktop(can_freeze=False))


@pytest.mark.parametrize(
    ("checker", "command"),
    [
        ({"kind": "command", "argv": ["cat", PATH]}, "cat"),
        ({"kind": "directory", "path": "/home/user", "entries": []}, "sh"),
        ({"kind": "clipboard", "equals": "x"}, "xclip"),
    ],
)
async def test_output_above_its_limit_scores_0_like_a_large_file(checker: dict[str, Any], command: str) -> None:
    desktop = MemoryDesktop()
    desktop.answers[command,] = TooLarge("its output exceeds the limit")
    evaluation = await score_of(checker, desktop)
    assert (evaluation.score, evaluation.checks[0].evidence) == (0, "its output exceeds the limit")


async def test_a_list_of_windows_above_its_limit_scores_0() -> None:
    desktop = MemoryDesktop()
    desktop.windows.append(OpenWindow(window_id="0x00000001", wm_class="a.A", title="x" * 70_000))
    evaluation = await score_of({"kind": "window", "window": {"title": "y"}, "present": False}, desktop)
    assert evaluation.score == 0
    assert "the limit is 65536" in evaluation.checks[0].evidence


async def test_a_task_whose_goal_is_to_power_off_is_scored_by_how_its_guest_ended() -> None:
    goal, other = task({"kind": "powered_off"}), task(TEXT)
    assert [judge_ended(goal, cause).score for cause in ("POWER_OFF", "REBOOT", "PANIC", "DISK_FULL")] == [1, 0, 0, 0]
    assert judge_ended(other, "POWER_OFF").score == 0
    assert (await evaluate(goal, MemoryDesktop(), last_action=Done(), timeout_s=60.0)).score == 0
    with pytest.raises(ValueError, match="powered_off: nothing else can be checked"):
        task({"kind": "any", "checks": [{"kind": "powered_off"}, TEXT]})


async def test_a_missing_file_or_a_directory_in_its_place_scores_zero(desktop: MemoryDesktop) -> None:
    evaluation = await score_of(TEXT, MemoryDesktop())
    assert evaluation.score == 0.0
    assert evaluation.checks[0].evidence == f"{PATH}: no such file"
    desktop.files.make_directory(PATH)
    assert (await score_of(TEXT, desktop)).score == 0.0


async def test_a_huge_file_scores_zero_and_is_never_read() -> None:
    desktop = desktop_with(a=b"right")
    desktop.answers["sh", "-c"] = CommandResult(exit_code=0, stdout=b"999999999999\n", stderr=b"")
    evaluation = await score_of(TEXT, desktop)
    assert evaluation.score == 0.0
    assert "999999999999 bytes" in evaluation.checks[0].evidence


async def test_a_failed_query_gives_no_score_and_a_lost_machine_stays_lost(desktop: MemoryDesktop) -> None:
    desktop.answers["sh", "-c"] = CommandResult(exit_code=1, stdout=b"", stderr=b"stat: I/O error")
    with pytest.raises(EvaluatorFailed, match="I/O error"):
        await score_of(TEXT, desktop)
    desktop.answers["sh", "-c"] = MachineLost("qemu exited")
    with pytest.raises(MachineLost):
        await score_of(TEXT, desktop)


async def test_an_evaluation_that_hangs_ends_at_its_limit_without_a_score() -> None:
    class Hanging(MemoryDesktop):
        async def run(self, argv: Sequence[str], **_: object) -> CommandResult:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(EvaluatorFailed, match=r"0\.01 s"):
        await evaluate(task(TEXT), Hanging(), last_action=None, timeout_s=0.01)


async def test_one_broken_part_leaves_no_score_even_if_another_part_would_suffice() -> None:
    desktop = desktop_with(a=b"right")
    desktop.answers["ps",] = GuestError("no ps")
    with pytest.raises(EvaluatorFailed, match="no ps"):
        await score_of({"kind": "any", "checks": [TEXT, {"kind": "process", "program": "x"}]}, desktop)


async def test_bytes_are_compared_by_digest_or_value() -> None:
    desktop = desktop_with(a=b"\x00\xff")
    digest = hashlib.sha256(b"\x00\xff").hexdigest()
    value = base64.b64encode(b"\x00\xff").decode()
    right_digest = await score_of({"kind": "file_bytes", "path": PATH, "sha256": digest}, desktop)
    right_value = await score_of({"kind": "file_bytes", "path": PATH, "base64": value}, desktop)
    wrong = await score_of({"kind": "file_bytes", "path": PATH, "base64": ""}, desktop)
    assert (right_digest.score, right_value.score, wrong.score) == (1.0, 1.0, 0.0)
    assert digest in wrong.checks[0].evidence


async def test_file_absent_requires_that_nothing_exists_at_the_path() -> None:
    checker = {"kind": "file_absent", "path": PATH}
    desktop = MemoryDesktop()
    assert (await score_of(checker, desktop)).score == 1.0
    desktop.files.make_directory(PATH)
    assert (await score_of(checker, desktop)).score == 0.0
    assert (await score_of(checker, desktop_with(a=b""))).score == 0.0


async def test_a_directory_is_compared_with_its_entries() -> None:
    desktop = desktop_with(a=b"", b=b"")
    desktop.files.make_directory("/home/user/sub")

    async def score(*entries: str, mode: str) -> float:
        checker = {"kind": "directory", "path": "/home/user", "entries": entries, "mode": mode}
        return (await score_of(checker, desktop)).score

    assert await score("a.txt", "b.txt", "sub/", mode="exactly") == 1.0
    assert await score("a.txt", "sub/", mode="exactly") == 0.0
    assert await score("a.txt", "sub/", mode="at_least") == 1.0
    assert await score("a.txt", "sub", mode="at_least") == 0.0
    assert await score("a.txt/", mode="at_least") == 0.0


async def test_a_directory_without_all_its_entries_says_what_is_missing(desktop: MemoryDesktop) -> None:
    desktop.answers["sh", "-c"] = CommandResult(exit_code=0, stdout=b"fa.txt\0fb.t", stderr=b"")
    checker = {"kind": "directory", "path": "/home/user", "entries": ["b.txt"]}
    with pytest.raises(EvaluatorFailed, match=r"incomplete.*'fb\.t'"):
        await score_of(checker, desktop)
    desktop = desktop_with(a=b"", b=b"")
    checker = {"kind": "directory", "path": "/home/user", "entries": ["a.txt", "c.txt"], "mode": "exactly"}
    evaluation = await score_of(checker, desktop)
    assert evaluation.checks[0].evidence == "missing: c.txt; unexpected: b.txt; found: a.txt, b.txt"
    evaluation = await score_of({"kind": "directory", "path": "/home/user/x", "entries": []}, MemoryDesktop())
    assert evaluation.score == 0.0
    assert "/home/user/x: no such directory" in evaluation.checks[0].evidence


async def test_a_command_is_judged_by_exit_code_and_output(desktop: MemoryDesktop) -> None:
    desktop.answers["wc",] = CommandResult(exit_code=0, stdout=b"7\r\n", stderr=b"")
    desktop.answers["grep",] = CommandResult(exit_code=1, stdout=b"", stderr=b"nothing found")

    async def score(**fields: object) -> float:
        return (await score_of({"kind": "command", **fields}, desktop)).score

    assert await score(argv=["wc"], stdout={"equals": "7"}) == 1.0
    assert await score(argv=["wc"], stdout={"matches": "8"}) == 0.0
    assert await score(argv=["wc"], exit_code=1) == 0.0
    assert await score(argv=["grep"]) == 0.0
    assert await score(argv=["grep"], exit_code=1) == 1.0
    assert await score(argv=["grep"], exit_code=None, stdout={"equals": ""}) == 1.0


async def test_a_command_that_cannot_be_run_gives_no_score(desktop: MemoryDesktop) -> None:
    desktop.answers["sh",] = CommandResult(exit_code=127, stdout=b"", stderr=b"sh: 1: soffice: not found")
    with pytest.raises(EvaluatorFailed, match="soffice: not found"):
        await score_of({"kind": "command", "argv": ["sh", "-c", "soffice"]}, desktop)
    with pytest.raises(EvaluatorFailed, match="no such program"):
        await score_of({"kind": "command", "argv": ["soffice"]}, desktop)


async def test_windows_are_found_by_title_and_class(desktop: MemoryDesktop) -> None:
    desktop.windows = [OpenWindow(window_id="0x00000010", wm_class="mousepad.Mousepad", title="~/a.txt - Mousepad")]

    async def score(present: bool, **match: str) -> float:
        return (await score_of({"kind": "window", "window": match, "present": present}, desktop)).score

    assert await score(True, title=r"a\.txt") == 1.0
    assert await score(True, title=r"b\.txt") == 0.0
    assert await score(True, title=r"a\.txt", **{"class": "galculator"}) == 0.0
    assert await score(False, **{"class": "galculator"}) == 1.0
    assert await score(False, **{"class": "Mousepad"}) == 0.0
    desktop.answers["wmctrl",] = CommandResult(exit_code=1, stdout=b"", stderr=b"Cannot open display.")
    with pytest.raises(EvaluatorFailed, match="Cannot open display"):
        await score_of({"kind": "window", "window": {"title": "x"}, "present": False}, desktop)


def test_a_window_list_with_unusual_titles_is_parsed() -> None:
    listing = (
        "0x00200008 -1 tint2.Tint2           N/A tint2\n"
        "0x00600003  0 mousepad.Mousepad     desktop *~/Docs/é 漢.txt -  Mousepad\n"
        "0x00600004  0 xterm.XTerm           desktop \n"
    )
    assert parse_windows(listing) == (
        OpenWindow(window_id="0x00200008", wm_class="tint2.Tint2", title="tint2"),
        OpenWindow(window_id="0x00600003", wm_class="mousepad.Mousepad", title="*~/Docs/é 漢.txt -  Mousepad"),
        OpenWindow(window_id="0x00600004", wm_class="xterm.XTerm", title=""),
    )
    (window,) = parse_windows("0x00600003  0 xterm.XTerm desktop first\nlast line\n")
    assert window.title == "first\nlast line"


def test_a_malformed_window_list_gives_no_score() -> None:
    with pytest.raises(GuestError, match="windows"):
        parse_windows("0x00600003 0\n")


async def test_windows_of_a_windows_guest_are_listed_by_a_script(desktop: MemoryDesktop) -> None:
    rows = b"0x00010164 0 explorer.CabinetWClass - Documents\r\n0x00010166 0 notepad.#32770 - Save as\r\n"
    desktop.answers["powershell.exe",] = CommandResult(exit_code=0, stdout=rows, stderr=b"")

    async def score(**match: str) -> float:
        return (await score_of({"kind": "window", "window": match}, desktop, os="windows")).score

    assert await score(title="^Save as$", **{"class": r"^notepad\.#32770"}) == 1.0
    assert await score(title="Save as", **{"class": "explorer"}) == 0.0
    assert desktop.ran[0][-1].startswith("# envd: list-windows\n")


def test_evidence_for_windows_lists_those_that_are_open() -> None:
    checker = WindowPresent.model_validate({"kind": "window", "window": {"title": "x"}})
    assert judge_windows(b"", checker).evidence == "open: no windows"
    assert judge_windows(b"0x1  0 a.A desktop t\n", checker).evidence == "open: 't' (a.A)"


def test_a_process_is_found_by_its_whole_name_and_a_zombie_does_not_run() -> None:
    listing = "Ss   systemd\nS    galculator\nZ    mousepad <defunct>\nR    my tool\n"

    def score(program: str, *, running: bool = True) -> float:
        return judge_processes(listing.encode(), ProcessRunning(kind="process", program=program, running=running)).score

    assert score("galculator") == 1.0
    assert score("calculator") == 0.0
    assert score("mousepad") == 0.0
    assert score("mousepad", running=False) == 1.0
    assert score("galculator", running=False) == 0.0
    assert score("my tool") == 1.0


def test_an_empty_process_list_gives_no_score() -> None:
    checker = ProcessRunning(kind="process", program="galculator", running=False)
    with pytest.raises(GuestError, match="processes"):
        judge_processes(b"", checker)


async def test_processes_are_queried_in_the_guest(desktop: MemoryDesktop) -> None:
    desktop.windows = [OpenWindow(window_id="0x00000010", wm_class="galculator.Galculator", title="galculator")]
    assert (await score_of({"kind": "process", "program": "galculator"}, desktop)).score == 1.0
    assert (await score_of({"kind": "process", "program": "mousepad"}, desktop)).score == 0.0


@pytest.mark.parametrize(
    ("ending", "expected"),
    [(None, 0.0), (Done(), 0.0), (Done(answer="  "), 0.0), (Done(answer="41"), 0.0), (Done(answer=" 42\n"), 1.0)],
)
async def test_an_answer_is_compared_without_surrounding_white_space(ending: Done | None, expected: float) -> None:
    evaluation = await score_of({"kind": "answer", "equals": "42"}, MemoryDesktop(), last_action=ending)
    assert evaluation.score == expected


@pytest.mark.parametrize(
    ("ending", "expected"), [(Fail(explanation="no such file"), 1.0), (Done(answer="fail"), 0.0), (None, 0.0)]
)
async def test_an_infeasible_task_is_solved_by_fail(ending: Done | Fail | None, expected: float) -> None:
    evaluation = await score_of(None, MemoryDesktop(), last_action=ending, infeasible=True)
    assert evaluation.score == expected
    assert evaluation.checks[0].name == "infeasible"


async def test_fail_on_a_feasible_task_scores_zero_even_if_it_is_solved() -> None:
    desktop = desktop_with(a=b"right")
    evaluation = await score_of(TEXT, desktop, last_action=Fail())
    assert evaluation.score == 0.0
    assert desktop.ran == []


async def test_parts_are_combined_by_all_any_and_weights() -> None:
    desktop = desktop_with(a=b"right")
    checks = [TEXT, {**TEXT, "equals": "wrong"}]
    assert (await score_of({"kind": "all", "checks": checks}, desktop)).score == 0.0
    assert (await score_of({"kind": "any", "checks": checks}, desktop)).score == 1.0
    assert (await score_of({"kind": "all", "checks": checks[:1]}, desktop)).score == 1.0
    desktop = desktop_with(a=b"right", b=b"other")
    nested = {"kind": "all", "checks": [{**TEXT, "path": "/home/user/b.txt", "name": "b"}]}
    parts = [{"weight": 3, "check": TEXT}, {"weight": 1, "check": nested}]
    evaluation = await score_of({"kind": "weighted", "checks": parts}, desktop)
    assert evaluation.score == 0.75
    assert [(check.name, check.score) for check in evaluation.checks] == [(f"file_text {PATH}", 1.0), ("b", 0.0)]
    parts = [{"weight": weight, "check": TEXT} for weight in (0.1, 0.2, 0.3)]
    assert (await score_of({"kind": "weighted", "checks": parts}, desktop_with(a=b"right"))).score == 1.0


async def test_evidence_never_exceeds_its_limit(desktop: MemoryDesktop) -> None:
    desktop.files.update({f"/home/user/{'n' * 100}{i}": b"" for i in range(100)})
    checker = {"kind": "directory", "path": "/home/user", "entries": ["x"]}
    assert len((await score_of(checker, desktop)).checks[0].evidence) == 2000


def test_checkers_that_are_slow_or_change_or_reveal_something_do_not_run_before_the_start() -> None:
    skipped = {kind.__name__ for kind in get_args(AnyLeafChecker) if not kind.runs_before_start}
    assert skipped == {"AgentAnswer", "Command", "CuaGymCheck", "OnScreen", "OpenComputerCheck", "OsworldEvaluator"}


def test_a_checker_must_say_whether_it_runs_before_the_start() -> None:
    with pytest.raises(TypeError, match="checker Forgetful: runs_before_start is missing"):

        class Forgetful(LeafChecker):
            @property
            def subject(self) -> str:
                return ""

            async def check(self, inspector: GuestInspector) -> CheckOutcome:
                return CheckOutcome(1.0, "")


def test_every_checker_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "checkers.md").read_text(encoding="utf-8")
    kinds = [get_args(kind.model_fields["kind"].annotation)[0] for kind in get_args(AnyLeafChecker)]
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []
