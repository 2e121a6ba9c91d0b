"""Made-up runs of `trainer learn`, for its report."""

import json
from collections.abc import Sequence
from pathlib import Path

from trainer.learn.record import HeldOutEvaluation, HeldOutScore, MetricsLog, recorded
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
                HeldOutScore(task_id=f"drawn/{template}?seed={seed}", score=score)
                for template, values in results.items()
                for seed, score in enumerate(values)
            ]
            at = {"update": 2 * bool(index), "env_steps": 120 * bool(index)}
            HeldOutEvaluation(**at, temperature=0.0, scores=scores).add_to(directory)
            HeldOutEvaluation(**at, temperature=1.0, scores=scores[:1]).add_to(directory)


def named(ablation: str, arm: str = "") -> Settings:
    """Return settings of an arm."""
    return SMOKE.model_copy(update={"ablation": ablation, "arm": arm})
