"""The report of `trainer learn`, over made-up runs: rates before and after, intervals over templates, and plots."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from trainer.cli.app import app
from trainer.learn import LearnError, report
from trainer.learn.metrics import MetricsLog
from trainer.learn.record import Evaluation, Score, read_record, recorded
from trainer.learn.report import write_report
from trainer.learn.settings import SMOKE, Settings

SPLITS = {"drawn/press": "train", "drawn/close": "held_out"}
Results = dict[str, Sequence[float | None]]
BEFORE: Results = {"press": [1, 0, 0, None], "close": [0, 0]}
AFTER: Results = {"press": [1, 1, 1, 1], "close": [1, 0]}


def made_up_run(
    run: Path, name: str, *greedy: Results, settings: Settings = SMOKE, seed: int = 0, updates: int = 2
) -> None:
    """Write a run with these greedy evaluations, one before and the others after its updates."""
    (run / "demos").mkdir(parents=True, exist_ok=True)
    (run / "demos" / "splits.json").write_text(json.dumps(SPLITS))
    directory = run / name
    with recorded(directory, settings, seed=seed), MetricsLog(directory) as log:
        for step in range(1, updates + 1):
            speed = {"s": 2.0, "steps_per_s": 30.0, "env_steps": 60.0 * step}
            shares = {"solved_frac": 0.1 * step, "escape_frac": 0.3}
            log.write("rl", step, {**speed, **shares, "void_frac": 0.1, "success_frac": 0.5})
        for index, results in enumerate(greedy):
            scores = [
                Score(task_id=f"drawn/{template}?seed={seed}", score=score)
                for template, values in results.items()
                for seed, score in enumerate(values)
            ]
            at = {"update": 2 * bool(index), "env_steps": 120 * bool(index)}
            Evaluation(**at, temperature=0.0, scores=scores).add_to(directory)
            Evaluation(**at, temperature=1.0, scores=scores[:1]).add_to(directory)


def fail(directory: Path, error: BaseException, *, settings: Settings = SMOKE) -> None:
    with recorded(directory, settings, seed=1):
        raise error


def named(ablation: str, arm: str = "") -> Settings:
    return SMOKE.model_copy(update={"ablation": ablation, "arm": arm})


@pytest.fixture
def without_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no plots of the arms' shares: a plot takes a third of a second."""
    monkeypatch.setattr(report, "_draw_shares", lambda *_: None)


@pytest.fixture
def without_plots(without_shares: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_draw", lambda *_: None)


def test_arms_without_a_plain_run_have_their_plot(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER, settings=named("tree", "siblings"))
    write_report([tmp_path], tmp_path / "report")
    assert (tmp_path / "report/ablations.svg").exists()


def test_a_run_without_evaluations_has_its_training_curves(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0")
    results = write_report([tmp_path], tmp_path / "report")
    assert results["runs"]["rl-0"]["updates"] == 2
    assert (tmp_path / "report/success_frac.svg").exists()
    assert not (tmp_path / "report/held_out.svg").exists()


@pytest.mark.usefixtures("without_plots")
def test_the_command_shows_held_out_success_or_else_that_of_training(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", updates=10)
    command = ["learn", "report", "--run", str(tmp_path)]
    shown = json.loads(CliRunner().invoke(app, command).stdout)
    assert shown == {"solved_frac": {"rl-0": [pytest.approx(0.3), pytest.approx(0.8)]}}
    made_up_run(tmp_path, "rl-1", BEFORE, AFTER)
    shown = json.loads(CliRunner().invoke(app, command).stdout)
    assert (shown["seeds"], shown["incomplete"], shown["held_out_before"]) == (1, 1, 0.2)


@pytest.mark.usefixtures("without_plots")
def test_void_episodes_count_neither_way(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER)
    grpo = write_report([tmp_path], tmp_path / "report")["grpo"]
    assert (grpo["held_out_before"], grpo["held_out_before_count"]) == (0.2, 5)
    assert grpo["held_out_after"] == pytest.approx(5 / 6)
    assert grpo["held_out_gain"] == pytest.approx(5 / 6 - 0.2)
    assert grpo["unseen_seeds"]["held_out_before_count"] == 3
    assert grpo["unseen_templates"]["held_out_after"] == 0.5
    assert grpo["sampled"]["all"]["held_out_before"] == 1.0
    press = grpo["by_template"]["drawn/press"]
    assert press["greedy"] == {"before": pytest.approx(1 / 3), "after": 1.0, "count": 4}
    assert (press["split"], press["sampled"]["count"]) == ("train", 1)


def test_seeds_are_pooled_and_the_report_has_plots_that_are_xml(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER)
    made_up_run(tmp_path, "rl-1", BEFORE, BEFORE, AFTER, seed=1, updates=40)
    results = write_report([tmp_path], tmp_path / "report")
    assert json.loads((tmp_path / "report" / "results.json").read_text()) == results
    assert (results["grpo"]["seeds"], results["grpo"]["held_out_after_count"]) == (2, 12)
    assert results["runs"]["rl-1"]["seconds_per_update"] == 2.0
    assert (results["runs"]["rl-1"]["env_steps"], results["runs"]["rl-1"]["status"]) == (2400.0, "ended")
    names = {path.stem for path in (tmp_path / "report").glob("*.svg")}
    assert names == {"success_frac", "sampled_entropy", "void_frac", "held_out", "templates"}
    for name in names:
        ET.fromstring((tmp_path / "report" / f"{name}.svg").read_text())  # noqa: S314 -- ours
    drawn = (tmp_path / "report" / "success_frac.svg").read_text()
    curves = [drawn.partition(f'<g id="{run}">')[2].partition("</g>")[0] for run in ("rl-0", "rl-1")]
    assert [len(re.findall("[ML] ", curve)) for curve in curves] == [2, 40]


@pytest.mark.usefixtures("without_plots")
def test_a_run_that_failed_is_listed_with_its_error_and_does_not_count(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER)
    with pytest.raises(LearnError):
        fail(tmp_path / "rl-1", LearnError("engine: device lost"))
    scores = [Score(task_id="drawn/press?seed=0", score=1.0)]
    Evaluation(update=0, temperature=0.0, scores=scores).add_to(tmp_path / "rl-1")
    results = write_report([tmp_path], tmp_path / "report")
    assert (results["grpo"]["seeds"], results["grpo"]["incomplete"]) == (1, 1)
    assert results["grpo"]["held_out_before"] == 0.2
    failed = results["runs"]["rl-1"]
    assert (failed["status"], failed["error"], failed["updates"]) == ("failed", "engine: device lost", 0)
    assert failed["greedy"]["all"]["held_out_after"] is None
    (tmp_path / "rl-0" / "evaluations.jsonl").unlink()
    assert write_report([tmp_path], tmp_path / "report")["grpo"]["held_out_after"] is None


def test_a_record_says_whether_a_run_still_runs_or_was_interrupted(tmp_path: Path) -> None:
    with recorded(tmp_path, SMOKE, seed=0):
        assert read_record(tmp_path)["status"] == "running"
    assert read_record(tmp_path)["status"] == "ended"
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path, KeyboardInterrupt(), settings=named("tree", "wide"))
    record = read_record(tmp_path)
    assert (record["status"], record["error"]) == ("interrupted", "")
    assert (record["ablation"], record["arm"], record["seed"]) == ("tree", "wide", 1)
    assert record["settings"]["rl"]["members"] == SMOKE.rl.members


@pytest.mark.usefixtures("without_shares")
def test_arms_are_compared_with_the_baseline_over_several_run_directories(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made_up_run(one, "baseline-0", BEFORE, AFTER, settings=named("baseline"))
    made_up_run(one, "tree-0", BEFORE, BEFORE, settings=named("tree"))
    made_up_run(one, "fake_zeros-30-zero-0", BEFORE, settings=named("fake_zeros", "30-zero"))
    made_up_run(two, "tree-1", BEFORE, AFTER, settings=named("tree"), seed=1)
    made_up_run(two, "control-0", BEFORE, settings=named("control"))
    results = write_report([one, two], tmp_path / "report")
    assert set(results["ablations"]) == {"fake_zeros", "tree"}
    tree = results["ablations"]["tree"]["arms"]
    assert set(tree) == {"baseline", "tree"}
    assert (tree["tree"]["runs"], tree["tree"]["complete"]) == (["one/tree-0", "two/tree-1"], 2)
    assert tree["tree"]["held_out_after"] == pytest.approx((1 + 5) / (5 + 6))
    assert tree["tree"]["env_steps"] == [120.0, 120.0]
    difference = results["ablations"]["tree"]["differences"]["tree - baseline"]
    assert difference["held_out_difference"] == pytest.approx(6 / 11 - 5 / 6)
    zeros = results["ablations"]["fake_zeros"]
    assert (zeros["arms"]["30-zero"]["held_out_after"], zeros["differences"]) == (None, {})
    assert (results["control"]["held_out_before"], results["control"]["held_out_after"]) == (None, 0.2)
    assert results["grpo"]["seeds"] == 1, "without plain runs, the baseline"
    picture = (tmp_path / "report" / "ablations.svg").read_text()
    assert ("tree: tree" in picture, "30-zero" in picture) == (True, False)


def test_arms_have_the_shares_of_all_episodes_at_the_start_and_the_end_of_each_run(tmp_path: Path) -> None:
    for seed in (0, 1):
        made_up_run(tmp_path, f"tree-{seed}", BEFORE, AFTER, settings=named("tree"), seed=seed, updates=10)
    results = write_report([tmp_path], tmp_path / "report")
    shares = results["ablations"]["tree"]["arms"]["tree"]["shares"]
    assert shares["solved_frac"] == [pytest.approx([0.3, 0.8])] * 2
    assert shares["escape_frac"] == [pytest.approx([0.3, 0.3])] * 2
    picture = (tmp_path / "report" / "tree-solved_frac.svg").read_text()
    assert "share of all episodes" in picture


def test_without_an_evaluation_or_demonstrations_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="no demonstrations"):
        write_report([tmp_path], tmp_path / "report")
    made_up_run(tmp_path, "rl-0", updates=0)
    with pytest.raises(LearnError, match="run the stage `rl` first"):
        write_report([tmp_path], tmp_path / "report")


@pytest.mark.usefixtures("without_shares")
def test_one_template_has_no_interval(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", {"press": [1, 0]}, {"press": [1, 1]}, settings=named("colour", "more"))
    (arm,) = write_report([tmp_path], tmp_path / "report")["ablations"]["colour"]["arms"].values()
    assert (arm["held_out_after"], arm["held_out_after_ci"], arm["held_out_gain_ci"]) == (1.0, None, None)


def test_runs_without_an_update_have_an_empty_plot(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER, updates=0)
    write_report([tmp_path], tmp_path / "report")
    assert "environment steps" in (tmp_path / "report" / "success_frac.svg").read_text()


def test_without_matplotlib_the_results_are_written_and_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER)
    with pytest.raises(LearnError, match=r"results\.json is written, but plots need matplotlib"):
        write_report([tmp_path], tmp_path / "report")
    assert json.loads((tmp_path / "report" / "results.json").read_text())["grpo"]["held_out_before_count"] == 5
