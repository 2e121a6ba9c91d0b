"""How much of the gain on drawn tasks is kept on the same tasks with real widgets, from files of `trainer eval`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config import InputError
from trainer.evaluate.results import Results
from trainer.evaluate.statistics import bootstrap, success_rate

_SIDES = {
    "drawn": re.compile(r"drawn/([a-z-]+)\?seed=([0-9]{1,9})"),
    "real": re.compile(r"widgets/([a-z-]+)-([0-9]{1,9})"),
}
_Task = tuple[str, int]


def kept(drawn: Sequence[Path], real: Sequence[Path]) -> dict[str, Any]:
    """Return success on both, by template too, and the kept share with a bootstrap over tasks, paired.

    Args:
        drawn: Results before, then those after reinforcement: one file of each policy.
        real: Those of the same policies, in the same order, on the same variants.

    Raises:
        InputError: A file cannot be read; has other tasks than the first one, an attempt without a score or two for a
            task; is of another model, or of an agent with another prompt; or nothing is gained on drawn tasks.
    """
    if not len(drawn) == len(real) > 1:
        raise InputError("give as many results of drawn tasks as of real ones: before, then after")
    read = [(path, Results.read(path)) for path in (*drawn, *real)]
    _require_same_policies(read)
    sides = ["drawn"] * len(drawn) + ["real"] * len(real)
    first, *others = [_solved(path, results, _SIDES[side]) for side, (path, results) in zip(sides, read, strict=True)]
    for path, each in zip((*drawn, *real)[1:], others, strict=True):
        if set(each) != set(first):
            raise InputError(f"{path} has other tasks than {drawn[0]}; evaluate the same variants, to the end")
    if not first:
        raise InputError(f"{drawn[0]} has no attempt; evaluate to the end")
    tasks = sorted(first)
    solved_PN = np.array([[each[task] for task in tasks] for each in (first, *others)], dtype=np.float64)
    drawn_PN, real_PN = np.split(solved_PN, 2)
    gains_2AN = np.stack([drawn_PN[1:] - drawn_PN[0], real_PN[1:] - real_PN[0]])
    if gains_2AN[0].sum() <= 0:
        raise InputError("nothing is gained on drawn tasks, so no share of it is kept")
    return {
        **{side: _success(tasks, each_PN) for side, each_PN in (("drawn", drawn_PN), ("real", real_PN))},
        "kept": _share(gains_2AN),
        "kept_by_policy": [_share(gains_2AN[:, [index]]) for index in range(len(drawn) - 1)],
    }


def _require_same_policies(read: Sequence[tuple[Path, Results]]) -> None:
    """Pair the files of both sides by their models: a gain on one side is that of the same policy on the other."""
    half = len(read) // 2
    for (path, one), (other_path, other) in zip(read[:half], read[half:], strict=True):
        if one.run.settings.get("model") != other.run.settings.get("model"):
            raise InputError(f"{path} and {other_path} are of two models; give both sides in one order")
    for path, results in read[1:]:
        if results.run.prompt_hash != read[0][1].run.prompt_hash:
            raise InputError(f"{path} is of an agent with another prompt than {read[0][0]}; evaluate by the same agent")


def _solved(path: Path, results: Results, task_id: re.Pattern[str]) -> Mapping[_Task, bool]:
    """Return whether each task was solved, by template and seed."""
    found: dict[_Task, bool] = {}
    for attempt in results.attempts:
        match = task_id.fullmatch(attempt.task_id)
        if match is None:
            raise InputError(f"{path}: {attempt.task_id!r} is not a task of this side, {task_id.pattern}")
        key = match[1], int(match[2])
        if attempt.is_error or key in found:
            raise InputError(f"{path}: {attempt.task_id} needs one attempt with a score")
        found[key] = attempt.succeeded
    return found


def _success(tasks: Sequence[_Task], solved_PN: npt.NDArray[np.float64]) -> dict[str, Any]:
    names = np.array([template for template, _ in tasks])
    return {
        "before": _rate(solved_PN[:1]),
        "after": _rate(solved_PN[1:]),
        "after_by_policy": [_rate(solved_PN[[index]]) for index in range(1, len(solved_PN))],
        "templates": {
            str(name): [int(each) for each in solved_PN[:, names == name].sum(axis=1)] for name in np.unique(names)
        },
    }


def rate(solved_by_task: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Return the share of solved attempts. Of several policies, tasks are resampled: their attempts are alike."""
    found = success_rate(solved_by_task)
    return {
        "right": sum(map(sum, solved_by_task)),
        "count": sum(map(len, solved_by_task)),
        "rate": round(found.mean, 4),
        "ci95": [round(found.low, 4), round(found.high, 4)],
    }


def _rate(solved_PN: npt.NDArray[np.float64]) -> dict[str, Any]:
    return rate([[bool(each) for each in column] for column in solved_PN.T])


def _share(gains_2AN: npt.NDArray[np.float64]) -> dict[str, Any] | None:
    """Return the gain on real tasks as a share of that on drawn ones; None if there is none, or may be none."""
    drawn_N, real_N = gains_2AN.sum(axis=1)

    def shares(picks_RN: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        gained_R = drawn_N[picks_RN].sum(axis=1)
        return np.where(gained_R > 0, real_N[picks_RN].sum(axis=1) / np.maximum(gained_R, 1), np.nan)

    low, high = bootstrap(len(drawn_N), shares)
    if drawn_N.sum() <= 0 or np.isnan(low):
        return None
    return {"share": round(float(real_N.sum() / drawn_N.sum()), 3), "ci95": [round(low, 3), round(high, 3)]}
