"""Success of a run's seeds by part of the held-out tasks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.learn_runs import named
from tests.tools.learning.__main__ import app
from tests.tools.learning.solved import solved
from trainer.learn import LearnError
from trainer.learn.record import HeldOutEvaluation, HeldOutScore, MetricsLog, recorded

_SPLITS = {"drawn/press": "train", "drawn/write": "train", "drawn/close": "held_out"}


def _run(run: Path, seed: int, *evaluations: tuple[Mapping[str, int | None], Mapping[str, int | None]]) -> Path:
    """Write a run; an evaluation has how many of four variants of each template are solved, greedily and sampled."""
    (run / "demos").mkdir(parents=True, exist_ok=True)
    (run / "demos" / "splits.json").write_text(json.dumps(_SPLITS))
    directory = run / f"reading-{seed}"
    with recorded(directory, named("reading"), seed=seed), MetricsLog(directory) as log:
        log.write("validation", 0, {"success_frac": 0.25})
        for step in range(1, 13):
            log.write("rl", step, {"s": 2.0, "env_steps": 60.0 * step, "parsed_frac": 1 - step / 100, "void_frac": 0.0})
        for update, both in enumerate(evaluations):
            for temperature, counts in zip((0.0, 1.0), both, strict=True):
                scores = [
                    HeldOutScore(
                        task_id=f"drawn/{name}?seed={variant}", score=None if count is None else float(variant < count)
                    )
                    for name, count in counts.items()
                    for variant in range(4)
                ]
                HeldOutEvaluation(update=12 * update, temperature=temperature, scores=scores).add_to(directory)
    return run


def _counts(shares: Mapping[str, Any], part: str) -> dict[str, tuple[int, int]]:
    return {name: (each["right"], each["count"]) for name, each in shares[part].items()}


BEFORE = {"press": 3, "write": 0, "close": 2}
SAMPLED = {"press": 2, "write": 1, "close": 0}
AFTER = {"press": 4, "write": 3, "close": 4}


def test_parts_are_counted_for_all_seeds_each_seed_and_the_control(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", 0, (BEFORE, SAMPLED), (AFTER, AFTER))
    _run(run, 1, (BEFORE, SAMPLED), ({"press": 4, "write": 1, "close": None}, AFTER))
    control = _run(tmp_path / "control", 0, (SAMPLED, BEFORE))
    printed = CliRunner().invoke(app, ["solved", str(run), "--control", str(control)])
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.output)
    assert _counts(found["pooled"], "never_by_base") == {
        "greedy_before": (0, 8),
        "greedy_after": (4, 8),
        "sampled_before": (2, 8),
        "sampled_after": (6, 8),
    }
    assert _counts(found["pooled"], "by_base")["greedy_after"] == (8, 8)
    assert _counts(found["pooled"], "unseen_templates")["greedy_after"] == (4, 4), "void episodes are left out"
    assert _counts(found["control"], "unseen_templates") == {"greedy": (0, 4), "sampled": (2, 4)}
    first, second = found["seeds"]
    assert _counts(first, "never_by_base")["greedy_after"] == (3, 4)
    assert (second["seed"], second["updates"], second["seconds"], second["env_steps"]) == (1, 12, 24, 720)
    assert second["templates_greedy"]["drawn/write"] == [0.0, 0.25]
    assert second["templates_greedy"]["drawn/close"] == [0.5, None]
    assert first["validation_sampled"] == [[0, 0.25]]
    assert first["parsed_frac"] == {"first_10": 0.945, "last_10": 0.925, "lowest": 0.88, "highest": 0.99}
    assert first["zero_std_frac"] is None


def test_intervals_of_several_seeds_resample_tasks_and_those_of_one_are_wilsons(tmp_path: Path) -> None:
    run = _run(tmp_path, 0, (BEFORE, BEFORE), (AFTER, AFTER))
    one = solved(run)["pooled"]["never_by_base"]["greedy_after"]
    assert one["ci95"] == pytest.approx([0.3006, 0.9544])
    _run(run, 1, (BEFORE, BEFORE), (AFTER, AFTER))
    both = solved(run)["pooled"]["never_by_base"]["greedy_after"]
    assert (both["rate"], both["ci95"]) == (0.75, pytest.approx([0.25, 1.0])), "as many tasks as before, not twice"


def test_the_templates_of_the_base_can_be_named(tmp_path: Path) -> None:
    run = _run(tmp_path, 0, (BEFORE, BEFORE), (AFTER, AFTER))
    printed = CliRunner().invoke(app, ["solved", str(run), "--by-base", "drawn/write"])
    assert _counts(json.loads(printed.output)["pooled"], "by_base")["greedy_after"] == (3, 4)


@pytest.mark.parametrize(
    ("evaluations", "controls", "message"),
    [
        ([(BEFORE, BEFORE)], 1, "reading-0 has 1 greedy evaluations of 2; let it end"),
        ([(BEFORE, BEFORE), (AFTER, AFTER)], 0, "has no run of the stage rl"),
        ([(BEFORE, BEFORE), (AFTER, AFTER)], 2, "has 2 runs of the stage rl"),
    ],
)
def test_runs_that_did_not_end_are_refused(tmp_path: Path, evaluations: list[Any], controls: int, message: str) -> None:
    run, control = _run(tmp_path / "run", 0, *evaluations), tmp_path / "control"
    (control / "demos").mkdir(parents=True)
    (control / "demos" / "splits.json").write_text("{}")
    for seed in range(controls):
        _run(control, seed, (BEFORE, BEFORE))
    with pytest.raises(LearnError, match=message):
        solved(run, control=control)
