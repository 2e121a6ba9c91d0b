"""Recordings of steps, settling replayed over them, and `envd bench settle` on drawn desktops."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cuaenv.region import Region
from envd.base.config import SettlePolicy
from envd.bench.settle import judge, settle_report
from envd.bench.settle_recording import Change, Refresh, StepRecording, replay_settling
from tests.support.command import run_envd

MENU = Region(x_px=0, y_px=0, width_px=200, height_px=100)
QUIET = SettlePolicy(idle_ms=0, quiet_ms=300)
INPUT_S = 50.0


def recorded(*changes_s: float, until_s: float = 6.0, works_until_s: float = 0.0) -> StepRecording:
    """Return a step, refreshed every 10 ms, whose changes are given in seconds after the input."""
    refreshes = [
        Refresh(INPUT_S + n / 100, INPUT_S + n / 100 + 0.005, 7.0 + min(n / 100, works_until_s))
        for n in range(int(until_s * 100))
    ]
    times_s = [INPUT_S + time_s for time_s in changes_s]
    changes = [Change(time_s, MENU, is_blink=False, pixels=None) for time_s in times_s]
    return StepRecording(
        input_s=INPUT_S,
        may_act_late=False,
        was_clicked=False,
        reacts_before_answer=False,
        refreshes=refreshes,
        changes=changes,
        content_s=times_s,
    )


@pytest.mark.parametrize(
    ("changes_s", "settle_s", "is_late"),
    [
        ([], 0.3, False),
        ([0.1, 0.25], 0.55, False),
        ([0.1, 0.39], 0.69, False),
        ([0.1, 0.5], 0.4, True),
        ([0.1, 3.3], 0.4, True),
        ([0.1, 3.5], 0.4, False),
    ],
)
async def test_a_policy_is_replayed_over_a_recording(
    changes_s: Sequence[float], settle_s: float, is_late: bool
) -> None:
    step = recorded(*changes_s)
    result, at_s = await replay_settling(step, QUIET)
    assert result.settled
    assert at_s - INPUT_S == pytest.approx(settle_s, abs=0.02)
    assert step.has_change_after(at_s, watch_s=3.0) is is_late


async def test_changes_that_were_known_as_blinking_do_not_restart_the_quiet_time() -> None:
    step = recorded(0.1, 0.2)
    step = replace(step, changes=[replace(change, is_blink=True) for change in step.changes])
    result, at_s = await replay_settling(step, QUIET)
    assert at_s - INPUT_S == pytest.approx(0.3, abs=0.02)
    assert result.change_count == 0


async def test_a_recording_that_ends_while_its_screen_moves_does_not_settle() -> None:
    step = recorded(*(n / 10 for n in range(60)), until_s=6.0)
    result, _ = await replay_settling(step, QUIET)
    assert not result.settled
    _, late_change_rate, unsettled_rate = await judge([step], QUIET, watch_s=0.5)
    assert (late_change_rate, unsettled_rate) == (0, 1)


async def test_an_idle_guest_settles_early_in_a_recording_unless_a_key_may_act_late() -> None:
    step, policy = recorded(0.1, works_until_s=0.2), QUIET.model_copy(update={"idle_ms": 50})
    _, at_s = await replay_settling(step, policy)
    assert at_s - INPUT_S == pytest.approx(0.27, abs=0.04)
    _, at_s = await replay_settling(replace(step, may_act_late=True), policy)
    assert at_s - INPUT_S == pytest.approx(0.4, abs=0.02)


async def test_a_native_guest_settles_once_it_is_idle_but_not_while_a_button_shows_that_it_was_clicked() -> None:
    step, policy = replace(recorded(0.01), reacts_before_answer=True), SettlePolicy()
    _, at_s = await replay_settling(step, policy)
    assert at_s - INPUT_S == pytest.approx(0.055, abs=0.03)
    _, at_s = await replay_settling(replace(step, was_clicked=True), policy)
    assert at_s - INPUT_S == pytest.approx(0.11, abs=0.02)
    _, at_s = await replay_settling(replace(step, was_clicked=True, reacts_before_answer=False), policy)
    assert at_s - INPUT_S == pytest.approx(0.31, abs=0.03), "the fixed quiet time: the input may not have arrived"


async def test_the_report_compares_policies_on_the_same_steps() -> None:
    steps = [recorded(0.1), recorded(0.1, 0.6), recorded(0.1, 0.3), recorded()]
    report = await settle_report(
        {"accelerator": "tcg"}, steps, policy=SettlePolicy(idle_ms=0, quiet_ms=100), watch_s=3.0
    )
    found = report.as_json()
    assert found["results"] == {
        "steps": 4,
        "late_change_rate": 0.5,
        "fixed_late_change_rate": 0.25,
        "settle_ms_p50": pytest.approx(205, abs=15),
        "settle_ms_p90": pytest.approx(205, abs=15),
        "fixed_settle_ms_p50": pytest.approx(405, abs=15),
        "fixed_settle_ms_p90": pytest.approx(605, abs=15),
        "unsettled_rate": 0,
    }
    curve = {row["policy"]: row["late_change_rate"] for row in report.tables["curve"]}
    assert (curve["pool"], curve["fixed 50 ms"], curve["fixed 1000 ms"]) == (0.5, 0.75, 0)
    assert found["curve"][0]["policy"] == "pool"  # type: ignore[index]


def test_bench_settle_records_and_replays_drawn_desktops(tmp_path: Path) -> None:
    options = ("--watch-s", "0.1", "--hypervisor", "fake", "--state-dir", str(tmp_path), "--json")
    done = run_envd("bench", "settle", "fake/save-note", *options)
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["conditions"]["tasks"] == ["fake/save-note"]
    assert report["results"]["steps"] == len(report["samples"]["settle_ms"]) == 3
    assert report["results"]["late_change_rate"] == report["results"]["fixed_late_change_rate"] == 0
    assert "recording fake/save-note" in done.err


def test_a_task_without_input_cannot_be_measured(tmp_path: Path) -> None:
    tasks, config = tmp_path / "idle.yaml", tmp_path / "envd.toml"
    task = {"name": "nothing", "level": 1, "instruction": "Do nothing.", "checker": {"kind": "answer", "equals": "x"}}
    tasks.write_text(json.dumps({"suite": "idle", "tasks": [{**task, "oracle": [[{"done": "x"}]]}]}))
    config.write_text(f'hypervisor.uri = "fake"\ntasks.suites = ["{tasks}"]\n')
    done = run_envd("bench", "settle", "idle/nothing", "--config", str(config), "--state-dir", str(tmp_path))
    assert done.status == 1
    assert "none of the tasks has a step with input; name tasks with an oracle" in done.err
