"""Read kept trajectories from JSON lines, and say of every line what became of it."""

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trainer.replay.trajectory import StoredTrajectory

_logger = logging.getLogger(__name__)

#: A file of another format has as many problems as lines; so many are named in the log.
_LOGGED_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What a file held. The counts sum to the number of its lines that are not blank."""

    trajectories: tuple[StoredTrajectory, ...]
    """In the order of the file."""
    failed_count: int
    """Rewards below the bar."""
    surplus_count: int
    """Successes of tasks that had enough already."""
    problems: tuple[str, ...]
    """Of each malformed line: its number and what is wrong."""

    def __str__(self) -> str:
        return (
            f"{len(self.trajectories)} kept, {self.failed_count} failed, {self.surplus_count} surplus,"
            f" {len(self.problems)} malformed"
        )


def read_jsonl(path: Path, *, success_at: float = 0.5, max_per_task: int = 10) -> ReadResult:
    """Read the successes of a file, the first ones of each task. A malformed line is named and skipped.

    Args:
        path: JSON lines in the form of `StoredTrajectory.from_row`.
        success_at: Least reward that is kept.
        max_per_task: How many are kept of one id, first come.

    Raises:
        FileNotFoundError: There is no such file.
    """
    kept: list[StoredTrajectory] = []
    per_task: Counter[str] = Counter()
    failed_count = surplus_count = 0
    problems: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                trajectory = StoredTrajectory.from_row(json.loads(line))
            # RecursionError: ten thousand brackets are too deep for the parser.
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
                continue
            if trajectory.reward < success_at:
                failed_count += 1
            elif per_task[trajectory.task_id] >= max_per_task:
                surplus_count += 1
            else:
                per_task[trajectory.task_id] += 1
                kept.append(trajectory)
    result = ReadResult(
        trajectories=tuple(kept), failed_count=failed_count, surplus_count=surplus_count, problems=tuple(problems)
    )
    for problem in problems[:_LOGGED_PROBLEMS]:
        _logger.warning("%s: %s", path, problem)
    _logger.info("%s: %s", path, result)
    return result
