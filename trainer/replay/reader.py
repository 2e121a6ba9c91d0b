"""Read stored trajectories from JSON lines, and count the result of every line."""

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trainer.replay.trajectory import StoredTrajectory

logger = logging.getLogger(__name__)

#: Maximum number of logged problems: a file of another format has one per line.
_LOGGED_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """The content of a file. The counts sum to the number of its non-blank lines."""

    trajectories: tuple[StoredTrajectory, ...]
    """Trajectories in the order of the file."""
    failed_count: int
    """Trajectories with too low a reward."""
    surplus_count: int
    """Successes beyond the maximum per task."""
    problems: tuple[str, ...]
    """Number and error of each malformed line."""

    def __str__(self) -> str:
        return (
            f"{len(self.trajectories)} kept, {self.failed_count} failed, {self.surplus_count} surplus,"
            f" {len(self.problems)} malformed"
        )


def read_jsonl(path: Path, *, success_at: float = 0.5, max_per_task: int | None = 10) -> ReadResult:
    """Read the first successes of each task. Malformed lines are reported and skipped.

    Args:
        path: JSON lines in the form of `StoredTrajectory.from_row`.
        success_at: Minimum reward.
        max_per_task: Maximum number of trajectories per task id and start, in file order; None for all.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    kept: list[StoredTrajectory] = []
    per_start: Counter[tuple[str, str]] = Counter()
    failed_count = surplus_count = 0
    problems: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                trajectory = StoredTrajectory.from_row(json.loads(line))
            # RecursionError: the JSON is nested too deeply.
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: {error}")
                continue
            if trajectory.reward < success_at:
                failed_count += 1
            elif max_per_task is not None and per_start[trajectory.task_id, trajectory.start] >= max_per_task:
                surplus_count += 1
            else:
                per_start[trajectory.task_id, trajectory.start] += 1
                kept.append(trajectory)
    result = ReadResult(
        trajectories=tuple(kept), failed_count=failed_count, surplus_count=surplus_count, problems=tuple(problems)
    )
    for problem in problems[:_LOGGED_PROBLEMS]:
        logger.warning("%s: %s", path, problem)
    logger.info("%s: %s", path, result)
    return result
