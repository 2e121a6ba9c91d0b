"""How much of the gain on drawn tasks is kept on the same tasks with real widgets, from files of `trainer eval`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config import InputError
from trainer.evaluate.results import Results
from trainer.evaluate.statistics import bootstrap, wilson

_TASK = re.compile(r"[^/]+/(.+?)(?:\?seed=|-)(\d+)")


def kept(drawn: Sequence[Path], real: Sequence[Path]) -> dict[str, Any]:
    """Return success on both, by template too, and the kept share with a bootstrap over tasks, paired.

    Args:
        drawn: Results before, then those after reinforcement: one file of each policy.
        real: The same policies on the same variants.

    Raises:
        InputError: A file cannot be read, or has other tasks than the first one, an attempt without a score or two
            attempts at a task; or nothing is gained on drawn tasks.
    """
    if not len(drawn) == len(real) > 1:
        raise InputError("give as many results of drawn tasks as of real ones: before, then after")
    first, *others = [_solved(path) for path in (*drawn, *real)]
    for path, each in zip((*drawn, *real)[1:], others, strict=True):
        if set(each) != set(first):
            raise InputError(f"{path} has other tasks than {drawn[0]}; evaluate the same variants")
    tasks = sorted(first)
    solved_PN = np.array([[each[task] for task in tasks] for each in (first, *others)], dtype=np.float64)
    drawn_PN, real_PN = np.split(solved_PN, 2)
    gains_2AN = np.stack([drawn_PN[1:] - drawn_PN[0], real_PN[1:] - real_PN[0]])
    return {
        **{side: _success(tasks, each_PN) for side, each_PN in (("drawn", drawn_PN), ("real", real_PN))},
        "kept": _share(gains_2AN),
        "kept_by_policy": [_share(gains_2AN[:, [index]]) for index in range(len(drawn) - 1)],
    }


def _solved(path: Path) -> Mapping[tuple[str, int], bool]:
    """Return whether each task was solved, by template and seed."""
    found: dict[tuple[str, int], bool] = {}
    for attempt in Results.read(path).attempts:
        match = _TASK.fullmatch(attempt.task_id)
        if match is None:
            raise InputError(f"{path}: {attempt.task_id} is not a variant of a template")
        key = match[1], int(match[2])
        if attempt.is_error or key in found:
            raise InputError(f"{path}: {attempt.task_id} needs one attempt with a score")
        found[key] = attempt.succeeded
    return found


def _success(tasks: Sequence[tuple[str, int]], solved_PN: npt.NDArray[np.float64]) -> dict[str, Any]:
    names = np.array([template for template, _ in tasks])
    return {
        "before": _rate(solved_PN[:1]),
        "after": _rate(solved_PN[1:]),
        "after_by_policy": [_rate(each_N) for each_N in solved_PN[1:]],
        "templates": {
            str(name): [int(each) for each in solved_PN[:, names == name].sum(axis=1)] for name in np.unique(names)
        },
    }


def _rate(solved: npt.NDArray[np.float64]) -> dict[str, Any]:
    found = wilson(float(solved.sum()), solved.size)
    ci = [round(found.low, 4), round(found.high, 4)]
    return {"right": int(solved.sum()), "count": solved.size, "rate": round(found.mean, 4), "ci95": ci}


def _share(gains_2AN: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the gain on real tasks as a share of that on drawn ones."""
    drawn_N, real_N = gains_2AN.sum(axis=1)
    if drawn_N.sum() <= 0:
        raise InputError("nothing is gained on drawn tasks")
    # 1 keeps a resample without a gain, which has no share, from dividing by 0.
    low, high = bootstrap(
        len(drawn_N), lambda picks_RN: real_N[picks_RN].sum(axis=1) / np.maximum(drawn_N[picks_RN].sum(axis=1), 1)
    )
    return {"share": round(float(real_N.sum() / drawn_N.sum()), 3), "ci95": [round(low, 3), round(high, 3)]}
