"""Arms of ablations and the control, compared over made-up runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cuaenv.cli import terminal
from tests.support.learn_runs import AFTER, BEFORE, made_up_run, named
from tests.tools.learning import comparison
from tests.tools.learning.__main__ import app
from tests.tools.learning.comparison import write_comparison


@pytest.fixture
def without_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no plots of the arms' shares: a plot takes a third of a second."""
    monkeypatch.setattr(comparison, "_draw_shares", lambda *_: None)


def test_arms_without_a_plain_run_have_their_plot(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", BEFORE, AFTER, settings=named("tree", "siblings"))
    write_comparison([tmp_path], tmp_path / "report")
    assert (tmp_path / "report/ablations.svg").exists()


@pytest.mark.usefixtures("without_shares")
def test_arms_are_compared_with_the_baseline_over_several_run_directories(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made_up_run(one, "baseline-0", BEFORE, AFTER, settings=named("baseline"))
    made_up_run(one, "tree-0", BEFORE, BEFORE, settings=named("tree"))
    made_up_run(one, "fake_zeros-30-zero-0", BEFORE, settings=named("fake_zeros", "30-zero"))
    made_up_run(two, "tree-1", BEFORE, AFTER, settings=named("tree"), seed=1)
    made_up_run(two, "control-0", BEFORE, settings=named("control"))
    results = write_comparison([one, two], tmp_path / "report")
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
    results = write_comparison([tmp_path], tmp_path / "report")
    shares = results["ablations"]["tree"]["arms"]["tree"]["shares"]
    assert shares["solved_frac"] == [pytest.approx([0.3, 0.8])] * 2
    assert shares["escape_frac"] == [pytest.approx([0.3, 0.3])] * 2
    picture = (tmp_path / "report" / "tree-solved_frac.svg").read_text()
    assert "share of all episodes" in picture


@pytest.mark.usefixtures("without_shares")
def test_one_template_has_no_interval(tmp_path: Path) -> None:
    made_up_run(tmp_path, "rl-0", {"press": [1, 0]}, {"press": [1, 1]}, settings=named("colour", "more"))
    (arm,) = write_comparison([tmp_path], tmp_path / "report")["ablations"]["colour"]["arms"].values()
    assert (arm["held_out_after"], arm["held_out_after_ci"], arm["held_out_gain_ci"]) == (1.0, None, None)


@pytest.mark.usefixtures("without_shares")
def test_the_command_writes_to_the_report_of_the_first_run(tmp_path: Path) -> None:
    made_up_run(tmp_path, "tree-0", BEFORE, AFTER, settings=named("tree"))
    done = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert (set(results["ablations"]), results["control"]) == ({"tree"}, None)
    failed = CliRunner().invoke(app, ["compare", str(tmp_path / "none")])
    assert failed.exit_code == terminal.EXIT_FAILED
    assert "no demonstrations" in failed.stderr
