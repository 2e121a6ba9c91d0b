"""How many held-out tasks the seeds of a run solve before and after reinforcement, and how many its control."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.tools.learning.kept import rate
from trainer.data.split import template_id
from trainer.learn import LearnError
from trainer.learn.record import read_metrics
from trainer.learn.report import LearnRun, read_runs

#: Templates that a base solves without a demonstration, so that reinforcement has little to add.
BY_BASE = tuple(f"drawn/{name}" for name in ("press", "press-colour", "press-two", "tick", "tick-two"))
_LAST = 10
_Plays = Mapping[str, Mapping[str, bool]]


def solved(run: Path, *, control: Path | None = None, by_base: Collection[str] = BY_BASE) -> dict[str, Any]:
    """Return success on parts of the held-out tasks: of all seeds together, of the control, and of each seed.

    The parts are unseen seeds of the trained templates `by_base`, of the other trained ones, and unseen templates. Void
    episodes are left out.

    Raises:
        LearnError: A directory has no demonstrations or no run of the stage `rl`; a seed lacks its evaluations before
            or after the updates; the control has several runs, or lacks its evaluation.
    """
    seeds = _runs(run)
    plays = [_plays(each, ("before", "after")) for each in seeds]
    splits = {template: split for each in seeds for template, split in each.splits.items()}

    def part(task_id: str) -> str:
        template = template_id(task_id)
        if splits.get(template) != "train":
            return "unseen_templates"
        return "by_base" if template in by_base else "never_by_base"

    def shares(of: Sequence[_Plays]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, list[list[bool]]]] = defaultdict(dict)
        for name in of[0]:
            attempts: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
            for each in of:
                for task_id, is_solved in each[name].items():
                    attempts[part(task_id)][task_id].append(is_solved)
            for where, by_task in attempts.items():
                found[where][name] = list(by_task.values())
        return {where: {name: rate(each) for name, each in by_name.items()} for where, by_name in sorted(found.items())}

    return {
        "pooled": shares(plays),
        "control": None if control is None else shares([_control(control)]),
        "seeds": [{**_course(each, run / each.name), **shares([one])} for each, one in zip(seeds, plays, strict=True)],
    }


def _runs(path: Path) -> list[LearnRun]:
    found = read_runs([path])
    if not found:
        raise LearnError(f"{path} has no run of the stage rl; run it first")
    return found


def _plays(run: LearnRun, names: Sequence[str]) -> _Plays:
    """Return whether each task was solved in the first of a run's evaluations, and in the last if it has two names."""
    found: dict[str, Mapping[str, bool]] = {}
    for kind in ("greedy", "sampled"):
        evaluations = run.evaluations_of(kind)
        if len(evaluations) < len(names):
            raise LearnError(f"{run.name} has {len(evaluations)} {kind} evaluations of {len(names)}; let it end")
        for name, each in zip(names, (evaluations[0], evaluations[-1]), strict=False):
            found[f"{kind}_{name}" if name else kind] = {
                score.task_id: score.score >= 1 for score in each.scores if score.score is not None
            }
    return found


def _control(path: Path) -> _Plays:
    run, *others = _runs(path)
    if others:
        raise LearnError(f"{path} has {len(others) + 1} runs of the stage rl; name one with the control alone")
    return _plays(run, ("",))


def _course(run: LearnRun, directory: Path) -> dict[str, Any]:
    """Return what a run did, and success by template, greedily."""
    updates = run.updates
    before, after = run.before("greedy"), run.after("greedy")
    return {
        "seed": run.record["seed"],
        "updates": len(updates),
        "seconds": round(sum(each["s"] for each in updates)),
        "env_steps": int(updates[-1]["env_steps"]) if updates else 0,
        "validation_sampled": [
            [each["step"], round(each["success_frac"], 4)]
            for each in read_metrics(directory)
            if each["stage"] == "validation"
        ],
        **{name: _ends(updates, name) for name in ("parsed_frac", "zero_std_frac", "sampled_entropy", "void_frac")},
        "templates_greedy": {
            name: [round(fmean(each[name]), 3) if name in each else None for each in (before, after)]
            for name in sorted({*before, *after})
        },
    }


def _ends(updates: Sequence[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Return the mean of a metric over the first and over the last updates, and its extremes; None without it."""
    values = [float(each[name]) for each in updates if name in each]
    if not values:
        return None
    means = {"first_10": fmean(values[:_LAST]), "last_10": fmean(values[-_LAST:])}
    return {name: round(value, 4) for name, value in {**means, "lowest": min(values), "highest": max(values)}.items()}
