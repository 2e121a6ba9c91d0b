"""Metrics of a run: JSON lines, TensorBoard where it is installed, and a line of progress."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from cuaenv.cli.terminal import err

logger = logging.getLogger(__name__)
_SHOWN = ("loss", "right_replies", "success_frac", "sampled_entropy", "void_frac", "rollout_s", "s", "steps_per_s")


class MetricsLog:
    """Writes the metrics of one directory. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        """Append to `directory/metrics.jsonl`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "metrics.jsonl").open("a", encoding="utf-8")
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- optional
        except Exception as error:  # with another protobuf than its own it raises more than ImportError
            logger.info("[learn] metrics are in %s only; tensorboard cannot be used: %s", self._file.name, error)
        else:
            self._board = SummaryWriter(str(directory / "tensorboard"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"stage": stage, "step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{stage}/{name}", value, step)
        shown = "  ".join(f"{name} {values[name]:.3f}" for name in _SHOWN if name in values)
        err.print(f"{stage} {step:>5}  {shown}", markup=False, highlight=False, soft_wrap=True)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def shares_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of all episodes, void ones included, that solved their task and that ended their guest."""
    if not facts:
        return {}
    return {
        "solved_frac": fmean(each.get("task_score", 0) >= 1 for each in facts),
        "escape_frac": fmean(bool(each.get("guest_end_cause")) for each in facts),
    }
