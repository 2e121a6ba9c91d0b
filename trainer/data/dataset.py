"""Join trajectories of several sources: the better source wins, unusable ones are dropped, and everything is counted.

Pure. The same files give the same bytes, in any order of their lines.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuaenv.client import Task
from trainer.agent.grammars import Grammar
from trainer.config import InputError
from trainer.data.split import SPLITS, Split, split
from trainer.data.transcripts import transcript_of, unparsable_turns
from trainer.replay.reader import ReadResult
from trainer.replay.trajectory import StoredTrajectory

_PLATFORMS = {"linux": "linux", "ubuntu": "linux", "windows": "windows"}
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The joined trajectories, and counts of the dropped ones."""

    items: tuple[StoredTrajectory, ...]
    """Ordered by base id, then by rank of their source; `source`, `os` and `split` of the metadata are the dataset's.

    `os` is `linux`, `windows`, or `unknown` without `os` or `platform` before.
    """
    dropped: Mapping[str, Mapping[str, int]]
    """Numbers by source of those that are failed, surplus, malformed, duplicates, unreadable, or have wrong images."""

    def parts(self) -> dict[tuple[str, Split], list[StoredTrajectory]]:
        platforms = (*dict.fromkeys(_PLATFORMS.values()), _UNKNOWN)
        parts: dict[tuple[str, Split], list[StoredTrajectory]] = {
            (name, split): [] for name in platforms for split in SPLITS
        }
        for item in self.items:
            parts[item.metadata["os"], item.metadata["split"]].append(item)
        return parts


def join(sources: Mapping[str, ReadResult], *, grammar: Grammar, share: float = 0.2, seed: int = 42) -> Dataset:
    """Join sources: drop unusable trajectories and duplicates, then split by task.

    Two trajectories are duplicates if their base tasks and messages are equal; the one of the better source is kept.

    Args:
        sources: What was read, by the name of its source, from best to worst.
        grammar: Trajectories with a turn that does not follow it strictly are dropped.
        share: Share of each level's tasks to hold out; 0 for none.

    Raises:
        InputError: A level cannot be in both splits.
    """
    kept: dict[tuple[str, str], tuple[int, StoredTrajectory]] = {}
    dropped = {name: Counter[str]() for name in sources}
    names = list(sources)
    for rank, (name, read) in enumerate(sources.items()):
        counts = dropped[name]
        counts["failed"] += read.failed_count
        counts["surplus"] += read.surplus_count
        counts["malformed"] += len(read.problems)
        for trajectory in sorted(read.trajectories, key=lambda each: (-each.reward, each.digest)):
            key = (trajectory.base_id, trajectory.messages_sha1)
            problem = "duplicate" if key in kept else _problem(trajectory, grammar)
            if problem:
                counts[problem] += 1
            else:
                kept[key] = (rank, trajectory)
    splits = split((_task_of(trajectory) for _, trajectory in kept.values()), share=share, seed=seed)
    ordered = sorted(kept.values(), key=lambda each: (each[1].base_id, each[0], each[1].task_id, each[1].digest))
    items = []
    for rank, trajectory in ordered:
        added = {"source": names[rank], "os": platform_of(trajectory), "split": splits[trajectory.base_id]}
        items.append(replace(trajectory, metadata={**trajectory.metadata, **added}))
    return Dataset(items=tuple(items), dropped=dropped)


def platform_of(trajectory: StoredTrajectory) -> str:
    """Return the guest's operating system."""
    named = str(trajectory.metadata.get("os") or trajectory.metadata.get("platform") or "").lower()
    return _PLATFORMS.get(named, _UNKNOWN)


def _task_of(trajectory: StoredTrajectory) -> Task:
    """Return the base task, with the properties that decide its split; others are not stored."""
    metadata = trajectory.metadata
    level = metadata.get("level")
    return Task(
        task_id=trajectory.base_id,
        instruction=str(metadata.get("instruction") or ""),
        level=level if isinstance(level, int) else 0,
        suite="",
        split=str(metadata.get("suite_split") or ""),
    )


def _problem(trajectory: StoredTrajectory, grammar: Grammar) -> str:
    try:
        transcript = transcript_of(trajectory)
    except InputError:
        return "wrong images"
    return "unreadable" if unparsable_turns(transcript, grammar) else ""


def statistics(dataset: Dataset) -> dict[str, Any]:
    """Return counts of the kept and dropped trajectories, as JSON."""
    return {
        "trajectories": len(dataset.items),
        "tasks": len({item.base_id for item in dataset.items}),
        "images": sum(len(item.images) for item in dataset.items),
        "by_source": _counts(item.metadata["source"] for item in dataset.items),
        "by_platform": _counts(item.metadata["os"] for item in dataset.items),
        "by_split": _counts(item.metadata["split"] for item in dataset.items),
        "by_level": {
            name: _counts(str(_task_of(item).level) for item in dataset.items if item.metadata["split"] == name)
            for name in ("train", "held_out")
        },
        "replies": _spread(
            [sum(message["role"] == "assistant" for message in item.messages) for item in dataset.items]
        ),
        "dropped": {name: _counts(counts) for name, counts in sorted(dataset.dropped.items())},
    }


def _counts(names: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(Counter(names).items()) if count}


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    return {"least": min(values), "mean": round(sum(values) / len(values), 2), "most": max(values)}
