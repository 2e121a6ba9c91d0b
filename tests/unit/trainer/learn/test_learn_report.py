"""The report of `trainer learn`: rates before and after, intervals over templates, and plots."""

import json
import re
from pathlib import Path

import pytest

from trainer.learn.errors import LearnError
from trainer.learn.report import interval, plot, write_report


def scores(**by_template: list[float | None]) -> list[dict[str, object]]:
    return [
        {"task_id": f"drawn/{name}?seed={seed}", "score": score}
        for name, values in by_template.items()
        for seed, score in enumerate(values)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "demos").mkdir()
    splits = {"drawn/press": "train", "drawn/close": "held_out"}
    (tmp_path / "demos" / "splits.json").write_text(json.dumps(splits))
    rl = tmp_path / "rl-0"
    rl.mkdir()
    lines = [
        {"update": 0, "temperature": 0.0, "scores": scores(press=[1, 0, 0, None], close=[0, 0])},
        {"update": 0, "temperature": 1.0, "scores": scores(press=[0, 0], close=[0])},
        {"update": 9, "temperature": 0.0, "scores": scores(press=[1, 1, 1, 1], close=[1, 0])},
    ]
    (rl / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = {"stage": "rl", "s": 2.0, "steps_per_s": 30.0, "void_frac": 0.1, "success_frac": 0.5}
    (rl / "metrics.jsonl").write_text("".join(json.dumps({**metrics, "step": step}) + "\n" for step in (1, 2)))
    return tmp_path


def test_void_episodes_count_neither_way(run: Path) -> None:
    greedy = write_report(run)["runs"]["rl-0"]["greedy"]
    assert greedy["all"]["held_out_before"] == 0.2
    assert greedy["all"]["held_out_after"] == pytest.approx(5 / 6)
    assert greedy["unseen_seeds"]["held_out_before_count"] == 3
    assert greedy["unseen_templates"]["held_out_after"] == 0.5
    assert greedy["by_template"]["drawn/press"] == [pytest.approx(1 / 3), 1.0]


def test_the_report_has_results_and_plots(run: Path) -> None:
    results = write_report(run)
    assert json.loads((run / "report" / "results.json").read_text()) == results
    assert set(results["grpo"]) == {
        *("seeds", "incomplete", "held_out_before", "held_out_after", "held_out_before_ci", "held_out_after_ci")
    }
    assert results["runs"]["rl-0"]["seconds_per_update"] == 2.0
    picture = (run / "report" / "success_frac.svg").read_text()
    assert [len(points.split()) for points in re.findall('<polyline points="([^"]*)"', picture)] == [2]


def test_a_run_that_ended_early_has_no_success_afterwards_and_does_not_count(run: Path) -> None:
    ended = run / "rl-1"
    ended.mkdir()
    line = {"update": 0, "temperature": 0.0, "scores": scores(press=[1, 1], close=[1, 1])}
    (ended / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    (ended / "metrics.jsonl").write_text("")
    results = write_report(run)
    assert results["runs"]["rl-1"]["greedy"]["all"]["held_out_after"] is None
    assert (results["grpo"]["seeds"], results["grpo"]["incomplete"]) == (1, 1)
    assert results["grpo"]["held_out_before"] == 0.2
    (run / "rl-0" / "evaluations.jsonl").unlink()
    assert write_report(run)["grpo"]["held_out_after"] is None


def test_a_run_without_evaluations_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="run the stage `rl` first"):
        write_report(tmp_path)


def test_an_interval_is_wide_where_templates_differ() -> None:
    alike = interval([[1, 0]] * 20)
    different = interval([[1, 1]] * 10 + [[0, 0]] * 10)
    assert alike == [0.5, 0.5]
    assert different[0] < 0.4
    assert different[1] > 0.6


def test_a_plot_of_nothing_is_an_empty_frame() -> None:
    assert "<polyline" in plot({"rl-0": []}, title="success")
