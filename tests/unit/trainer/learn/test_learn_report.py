"""The report of `trainer learn`, over made-up runs: rates before and after, intervals over templates, and plots."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from tests.support.learn_runs import AFTER, BEFORE, made_up_run, named
from trainer.cli.app import app
from trainer.learn import LearnError, report
from trainer.learn.record import HeldOutEvaluation, HeldOutScore, read_record, recorded
from trainer.learn.report import write_report
from trainer.learn.settings import SMOKE, Settings


def fail(directory: Path, error: BaseException, *, settings: Settings = SMOKE) -> None:
    with recorded(directory, settings, seed=1):
        raise error


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no plots: a plot takes a third of a second."""
    monkeypatch.setattr(report, "_draw", lambda *_: None)


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
    scores = [HeldOutScore(task_id="drawn/press?seed=0", score=1.0)]
    HeldOutEvaluation(update=0, temperature=0.0, scores=scores).add_to(tmp_path / "rl-1")
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


def test_without_an_evaluation_or_demonstrations_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="no demonstrations"):
        write_report([tmp_path], tmp_path / "report")
    made_up_run(tmp_path, "rl-0", updates=0)
    with pytest.raises(LearnError, match="run the stage `rl` first"):
        write_report([tmp_path], tmp_path / "report")


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
