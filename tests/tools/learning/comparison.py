"""Compare the arms of ablations with each other and with a control, over finished runs of `trainer learn`.

Runs of the ablation `baseline` are an arm of every comparison. Those of `control` are evaluated once, at their end.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from cuaenv.plots import svg_plot
from trainer.evaluate.statistics import ByTemplate, pooled_gain
from trainer.learn.report import (
    SHARES,
    LearnRun,
    before_and_after,
    draw_curves,
    pooled,
    read_runs,
    set_rows,
    steps_of,
    write_report,
    write_results,
)

_BASELINE, _CONTROL = "baseline", "control"
_TITLES = dict(zip(SHARES, ("share of all episodes that solve their task", "share that end their guest"), strict=True))


def write_comparison(runs: Sequence[Path], directory: Path) -> dict[str, Any]:
    """Write the report of `trainer learn`, and to its results and plots the control and the arms of each ablation.

    Raises: LearnError: See `trainer.learn.report.write_report`.
    """
    results, found = write_report(runs, directory), read_runs(runs)
    compared = _compared(found)
    results["control"] = _arm([run for run in found if run.ablation == _CONTROL])
    results["ablations"] = {
        name: {"arms": {arm: _arm(each) for arm, each in arms.items()}, "differences": _differences(arms)}
        for name, arms in compared.items()
    }
    write_results(directory, results)
    _draw_arms(directory, results["ablations"])
    for ablation, arms in compared.items():
        _draw_shares(directory, ablation, arms)
    return results


def _compared(runs: Sequence[LearnRun]) -> dict[str, dict[str, list[LearnRun]]]:
    """Return the runs of each arm of each comparison; the baseline is an arm of all."""
    named: dict[str, dict[str, list[LearnRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.ablation not in ("", _BASELINE, _CONTROL):
            named[run.ablation][str(run.record["arm"] or run.ablation)].append(run)
    baseline = [run for run in runs if run.ablation == _BASELINE]
    shared = {_BASELINE: baseline} if baseline else {}
    return {name: {**shared, **arms} for name, arms in sorted(named.items())}


def _before(run: LearnRun, kind: str) -> ByTemplate:
    return {} if run.ablation == _CONTROL else run.before(kind)


def _after(run: LearnRun, kind: str) -> ByTemplate:
    return run.before(kind) if run.ablation == _CONTROL else run.after(kind)


def _arm(runs: Sequence[LearnRun]) -> dict[str, Any] | None:
    if not runs:
        return None
    complete = [run for run in runs if _after(run, "greedy")]
    greedy, sampled = (
        before_and_after(pooled(_before(run, kind) for run in complete), pooled(_after(run, kind) for run in complete))
        for kind in ("greedy", "sampled")
    )
    return {
        "runs": [run.name for run in runs],
        "complete": len(complete),
        "env_steps": [run.as_json()["env_steps"] for run in complete],
        "shares": {name: [run.shares()[name] for run in runs if name in run.shares()] for name in SHARES},
        **greedy,
        "sampled": sampled,
    }


def _differences(arms: Mapping[str, Sequence[LearnRun]]) -> dict[str, Any]:
    after = {arm: pooled(run.after("greedy") for run in runs) for arm, runs in arms.items()}
    return {
        f"{second} - {first}": pooled_gain(after[first], after[second]).as_fields("held_out_difference")
        for first, second in combinations([arm for arm in after if after[arm]], 2)
    }


def _draw_arms(directory: Path, ablations: Mapping[str, Any]) -> None:
    arms = {
        f"{name}: {arm}": each
        for name, found in ablations.items()
        for arm, each in found["arms"].items()
        if each["held_out_after_ci"] is not None
    }
    if not arms:
        return
    title = "Greedy success on held-out tasks at equal environment steps, 95 % intervals"
    with svg_plot(directory / "ablations.svg", title=title, height_in=1.2 + 0.26 * len(arms)) as axes:
        for row, each in enumerate(arms.values()):
            axes.plot(each["held_out_after_ci"], [row, row], color="C0", alpha=0.5, linewidth=3)
            axes.plot(each["held_out_after"], row, "o", color="C0")
        set_rows(axes, list(arms), x_max=min(1.0, 0.05 + max(each["held_out_after_ci"][1] for each in arms.values())))


def _draw_shares(directory: Path, ablation: str, arms: Mapping[str, Sequence[LearnRun]]) -> None:
    """Draw the mean curve of each arm's runs, as far as all of them go, if they have such metrics."""
    for name, title in _TITLES.items():
        curves = {}
        for arm, runs in arms.items():
            steps = zip(*(run.updates for run in runs if name in run.shares()), strict=False)
            curves[arm] = [(fmean(map(steps_of, each)), fmean(one[name] for one in each)) for each in steps]
        if any(curves.values()):
            draw_curves(directory / f"{ablation}-{name}.svg", curves, title=f"{ablation}: {title}")
