"""Comparing two kinds of desktops: scripts, Cohen's kappa, screens and the report."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cuaenv.actions import Done, Fail, Move, TypeText, Wait
from cuaenv.agent_text.values import ParseError
from envd.authoring.parity.playing import PlayedScript, SideName, add_screen, stored_screen
from envd.authoring.parity.report import ParityReport, cohens_kappa, pair_up
from envd.authoring.parity.screens import compare
from envd.authoring.parity.scripts import WALK_STEPS, ParityScript, read_trajectories, scripts_of, walk
from envd.base.errors import ConfigError
from envd.tasks.model import Task

SIZE_PX = (1280, 800)


def task(*, oracle: list[object]) -> Task:
    checker = {"kind": "file_absent", "path": "/a"}
    return Task.model_validate(
        {"task_id": "a/one", "instruction": "i", "level": 1, "checker": checker, "oracle": oracle}
    )


def test_scripts_are_oracles_nothing_and_walks_each_with_its_digest() -> None:
    found = scripts_of(task(oracle=[[{"type": "x"}], ["done"]]), walk_count=2, seed=7)
    assert [each.name for each in found] == ["oracle", "nothing", "walk 0", "walk 1"]
    assert [each.kind for each in found] == ["oracle", "nothing", "walk", "walk"]
    assert found[0].steps_on(SIZE_PX) == ((TypeText("x"),), (Done(),))
    assert list(found[1].steps_on(SIZE_PX)) == [(Done(),)]
    assert [each.name for each in scripts_of(task(oracle=[]), walk_count=0, seed=7)] == ["nothing"]
    scripts = [
        ParityScript(name="oracle", steps=[(Done(),)]),
        ParityScript(name="oracle", steps=[(Fail(),)]),
        ParityScript(name="walk 0", seed="a"),
        ParityScript(name="walk 0", seed="b"),
        ParityScript(name="trajectory a", calls=["DONE"]),
        ParityScript(name="trajectory a", calls=["FAIL"]),
        ParityScript(name="nothing"),
    ]
    assert len({each.digest(own) for each in scripts for own in ("x", "y")}) == 2 * len(scripts)


def test_a_random_walk_depends_on_its_seed_and_ends_the_episode() -> None:
    assert list(walk("a", SIZE_PX)) == list(walk("a", SIZE_PX)) != list(walk("b", SIZE_PX))
    steps = ParityScript(name="walk 0", seed="a").steps_on(SIZE_PX)
    assert len(steps) == WALK_STEPS + 1
    assert steps[-1] == (Done(),)
    # All kinds of calls are among so many walks, and each can be parsed.
    calls = {call.partition("(")[0] for seed in range(50) for call in walk(str(seed), SIZE_PX)}
    assert len(calls) == 7
    for seed in range(50):
        ParityScript(name="walk 0", seed=str(seed)).steps_on((512, 320))


def write_trajectory(directory: Path, *lines: object) -> None:
    directory.mkdir(parents=True)
    (directory / "traj.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_recorded_actions_of_agents_are_read_as_osworlds_runner_writes_them(tmp_path: Path) -> None:
    calls = ["import pyautogui; pyautogui.moveTo(10, 20)", "pyautogui.move(1, 2)", "WAIT", "FAIL"]
    write_trajectory(tmp_path / "model" / "os" / "one", *({"step_num": 1, "action": call} for call in calls))
    [script] = read_trajectories(tmp_path)["one"]
    assert script.name == "trajectory model/os/one"
    first, second, wait, end = script.steps_on(SIZE_PX)
    assert (first, second, end) == ((Move(x=10, y=20),), (Move(x=11, y=22),), (Fail(),))
    assert isinstance(wait[0], Wait)
    assert script.calls_on(SIZE_PX) == calls


def test_trajectories_that_cannot_be_read_or_played_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no file TASK"):
        read_trajectories(tmp_path)
    write_trajectory(tmp_path / "one", {"action": {"type": "click"}})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trajectories(tmp_path)
    write_trajectory(tmp_path / "playable" / "two", {"action": "for x in range(3): pyautogui.click(x, x)"})
    [script] = read_trajectories(tmp_path / "playable")["two"]
    with pytest.raises(ParseError):
        script.steps_on(SIZE_PX)


@pytest.mark.parametrize(
    ("pairs", "kappa"),
    [
        # By hand: 35 of 50 agree (0.7); by chance (25 * 30 + 25 * 20) / 50 ** 2 = 0.5; (0.7 - 0.5) / (1 - 0.5).
        ([(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15, 0.4),
        ([(1, 1), (0, 0)], 1.0),
        ([(1, 0), (0, 1)], -1.0),
        # As often as by chance: 2 of 4, and (2 * 2 + 2 * 2) / 16.
        ([(1, 1), (1, 0), (0, 1), (0, 0)], 0.0),
        # No score is on both sides, so there is no agreement, by chance or otherwise.
        ([(0, 1), (0, 1)], 0.0),
        # Three scores: 3 of 4 agree; by chance (1 * 1 + 1 * 2 + 2 * 1) / 16 = 5 / 16; (12 - 5) / (16 - 5).
        ([(0, 0), (0.5, 0.5), (1, 1), (1, 0.5)], 7 / 11),
        # Sums of thirds that differ by rounding are one score.
        ([(0.1 + 0.2, 0.3), (0, 0)], 1.0),
        ([(1, 1), (1, 1)], None),
        ([], None),
    ],
)
def test_cohens_kappa_is_agreement_beyond_that_by_chance(pairs: list[tuple[float, float]], kappa: float | None) -> None:
    assert cohens_kappa(pairs) == (None if kappa is None else pytest.approx(kappa))


def png(*boxes: tuple[int, int, int, int], size_px: tuple[int, int] = SIZE_PX) -> bytes:
    """Return a white screen with black boxes."""
    picture_HW = np.full(size_px[::-1], 255, dtype=np.uint8)
    for left, top, width, height in boxes:
        picture_HW[top : top + height, left : left + width] = 0
    file = io.BytesIO()
    Image.fromarray(picture_HW).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("box", "cause"),
    [
        ((300, 200, 1, 17), "caret"),
        ((300, 200, 3, 40), "caret"),
        ((300, 200, 4, 17), ""),
        ((300, 200, 1, 41), ""),
        ((300, 200, 2, 2), ""),
        ((590, 5, 100, 20), "clock"),
        ((100, 5, 100, 20), ""),
        ((590, 15, 100, 20), ""),
        # Over several tiles.
        ((60, 60, 100, 100), ""),
    ],
)
def test_a_difference_is_one_box_with_its_cause(box: tuple[int, int, int, int], cause: str) -> None:
    assert compare(png(), png(box)) == [(box, cause)]


def test_distant_differences_are_separate_and_equal_screens_have_none() -> None:
    boxes = ((10, 10, 5, 5), (700, 500, 1, 20))
    assert compare(png(), png(*boxes)) == [(boxes[0], ""), (boxes[1], "caret")]
    assert compare(png(*boxes), png(*boxes)) == []
    assert compare(png(), png(size_px=(640, 400))) == [((0, 0, 1280, 800), "size")]


def played(side: SideName, script: str, score: float | None, *screens: str, detail: str = "") -> PlayedScript:
    return PlayedScript(
        digest=f"{side} {script}",
        side=side,
        task_id="a/one",
        script=script,
        score=score,
        screens=screens,
        detail=detail,
    )


def test_a_report_lists_disagreements_and_counts_no_void_script_as_a_score(tmp_path: Path) -> None:
    screens = tmp_path
    plain, caret, other = (
        add_screen(screens, png(*boxes)) for boxes in ((), [(300, 200, 1, 17)], [(300, 200, 50, 50)])
    )
    lefts = [
        played("left", "oracle", 1.0, plain, plain),
        played("left", "nothing", 0.0, plain, plain),
        played("left", "walk 0", 0.5, plain, plain, detail="file: <b>half</b>"),
        played("left", "walk 1", None, plain, plain, detail="MACHINE_LOST: gone"),
        played("left", "walk 2", 0.0, plain, plain),
    ]
    rights = [
        played("right", "oracle", 1.0, plain, caret),
        played("right", "nothing", 0.0, plain, other),
        played("right", "walk 0", 0.0, plain, plain),
        played("right", "walk 1", 0.0, plain, plain),
    ]
    report = ParityReport(left="fake", right="oci:", pairs=pair_up(lefts, rights, screens), screens=screens)
    found = json.loads(json.dumps(report.as_json()))
    assert not report.passed
    assert {name: found[name] for name in ("scripts", "scored", "agreed", "void", "not_played")} == {
        "scripts": 5,
        "scored": 3,
        "agreed": 2,
        "void": 1,
        "not_played": 1,
    }
    assert found["agreement"] == pytest.approx(2 / 3)
    # By hand: 2 of 3 agree; by chance (1 * 1 + 1 * 2 + 1 * 0) / 9; (6 - 3) / (9 - 3).
    assert found["kappa"] == pytest.approx(0.5)
    assert found["kinds"]["oracle"]["kappa"] is None
    assert [each["script"] for each in found["disagreements"]] == ["walk 0"]
    assert [each["script"] for each in found["void_scripts"]] == ["walk 1"]
    assert found["screens"]["last"] == {"compared": 4, "equal": 2, "named": 1, "other": 1}
    page = report.page()
    assert "undefined: all scores are equal" in page
    assert "&lt;b&gt;half" in page
    assert "a/one: walk 1" in page
    assert "data:image/png;base64,iVBOR" in page


def test_equal_scores_of_all_scripts_pass(tmp_path: Path) -> None:
    screens = tmp_path
    lefts, rights = [played("left", "oracle", 1.0)], [played("right", "oracle", 1.0)]
    assert ParityReport(left="a", right="b", pairs=pair_up(lefts, rights, screens), screens=screens).passed
    assert not ParityReport(left="a", right="b", pairs=pair_up(lefts, [], screens), screens=screens).passed
    # One side alone has nothing to agree with yet.
    assert ParityReport(left="a", right="", pairs=pair_up(lefts, [], screens), screens=screens).passed
    assert not ParityReport(left="a", right="b", pairs=[], screens=screens).passed


def test_a_picture_is_stored_once_and_may_be_removed(tmp_path: Path) -> None:
    screens = tmp_path / "screens"
    assert add_screen(screens, b"one") == add_screen(screens, b"one") != add_screen(screens, b"two")
    assert stored_screen(screens, add_screen(screens, b"one")) == b"one"
    assert stored_screen(screens, "removed.png") == b""
