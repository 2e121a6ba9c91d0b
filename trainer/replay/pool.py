"""Keep successes by task, within bounds, and pick from them: the same picks from the same seed, also after a resume.

The n-th pick for a task depends on the seed, the task and n alone. Groups finish in any order, so a single stream of
random numbers would give each run other picks.

A rollout that never stops adds from a thread of its own while the trainer picks and saves: hence a lock. Who adds never
waits for a file.
"""

import json
import os
import random
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from trainer.replay.trajectory import StoredTrajectory, base_id, canonical

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds and seed.

    Raises:
        ValueError: A value is out of range.
    """

    seed: int = 0
    success_at: float = 0.5
    """Least raw reward of a success: of what is kept, and of a group that needs no help."""
    max_per_task: int = 10
    max_total: int = 1000
    demonstrations: bool = False
    """Also pick what has no log-probabilities. Only for a trainer that gives such samples an SFT loss: a policy
    gradient would need to know how likely they were."""

    def __post_init__(self) -> None:
        if not 0.0 < self.success_at <= 1.0:
            raise ValueError(f"success_at is {self.success_at}; it must be above 0 and at most 1")
        if self.max_per_task < 1 or self.max_total < 1:
            raise ValueError(f"max_per_task is {self.max_per_task}, max_total {self.max_total}; both are at least 1")


@dataclass(slots=True)
class Counters:
    """What happened since the pool was made, across resumes."""

    check_count: int = 0
    """Groups that were looked at."""
    injected_count: int = 0
    missed_count: int = 0
    """Groups that failed and for which there was nothing to pick."""
    added_count: int = 0
    """Online successes that were kept."""
    displaced_count: int = 0
    """Earlier online successes that gave way to later ones."""
    refused_count: int = 0
    """Successes for which there was no room."""


class PoolMismatch(ValueError):
    """What was saved was saved by a pool of other settings, or by another release."""


@dataclass(slots=True)
class _Kept:
    trajectory: StoredTrajectory
    online: bool


@dataclass(slots=True)
class ReplayPool:
    """Successes by task."""

    settings: PoolSettings = field(default_factory=PoolSettings)
    counters: Counters = field(default_factory=Counters)
    _shelves: dict[str, list[_Kept]] = field(default_factory=dict)
    _picks: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __len__(self) -> int:
        with self._lock:
            return self._size()

    def _size(self) -> int:
        return sum(map(len, self._shelves.values()))

    def load(self, trajectories: Iterable[StoredTrajectory]) -> int:
        """Keep what was read from files, first come, within the bounds. Returns how many there was room for.

        What is kept already is not kept twice, so the same files may be loaded after a resume.
        """
        loaded_count = 0
        with self._lock:
            known = {kept.trajectory.digest for shelf in self._shelves.values() for kept in shelf}
            for trajectory in trajectories:
                shelf = self._shelves.get(trajectory.task_id, [])
                if trajectory.reward < self.settings.success_at or trajectory.digest in known:
                    continue
                if len(shelf) >= self.settings.max_per_task or self._size() >= self.settings.max_total:
                    self.counters.refused_count += 1
                    continue
                known.add(trajectory.digest)
                self._shelves.setdefault(trajectory.task_id, []).append(_Kept(trajectory, online=False))
                loaded_count += 1
        return loaded_count

    def add(self, trajectory: StoredTrajectory) -> bool:
        """Keep a success of the policy that is trained; where there is no room, in place of its task's oldest one.

        What came from files never gives way. Returns whether it was kept.
        """
        if trajectory.reward < self.settings.success_at:
            return False
        with self._lock:
            shelf = self._shelves.get(trajectory.task_id, [])
            if len(shelf) >= self.settings.max_per_task or self._size() >= self.settings.max_total:
                oldest = next((kept for kept in shelf if kept.online), None)
                if oldest is None:
                    self.counters.refused_count += 1
                    return False
                shelf.remove(oldest)
                self.counters.displaced_count += 1
            self._shelves.setdefault(trajectory.task_id, []).append(_Kept(trajectory, online=True))
            self.counters.added_count += 1
            return True

    def pick(self, task_id: str) -> StoredTrajectory | None:
        """Pick a success of the task, else of one of the chunks of its base task; None if there is none."""
        with self._lock:
            shelves = [self._eligible(task_id)]
            if not shelves[0]:
                base = base_id(task_id)
                shelves = [self._eligible(other) for other in self._shelves if base_id(other) == base]
            shelves = [shelf for shelf in shelves if shelf]
            if not shelves:
                return None
            count = self._picks.get(task_id, 0)
            self._picks[task_id] = count + 1
        # Not for secrets; a text as a seed is the same in every process.
        chance = random.Random(f"{self.settings.seed}/{task_id}/{count}")  # noqa: S311
        return chance.choice(chance.choice(shelves))

    def _eligible(self, task_id: str) -> list[StoredTrajectory]:
        return [
            kept.trajectory
            for kept in self._shelves.get(task_id, [])
            if kept.trajectory.rows or self.settings.demonstrations
        ]

    def statistics(self) -> dict[str, float]:
        """Return sizes and counters, to log."""
        with self._lock:
            online_count = sum(kept.online for shelf in self._shelves.values() for kept in shelf)
            sizes = {"task_count": len(self._shelves), "size": self._size(), "online_size": online_count}
        return {f"replay/{name}": float(value) for name, value in {**sizes, **asdict(self.counters)}.items()}

    def save(self, directory: Path, *, name: str = "latest") -> None:
        """Write all of it, so that a crash at any time leaves either the former state or this one.

        Trajectories are files of their own, named by digest and written once; only the small index is written each
        time. Files that no index in the directory names are removed at the end.

        Args:
            directory: Made if need be.
            name: Of this state, such as a checkpoint's number; the directory may hold several.
        """
        items = directory / "trajectories"
        items.mkdir(parents=True, exist_ok=True)
        with self._lock:
            kept_by_task = {task_id: list(shelf) for task_id, shelf in self._shelves.items()}
            counters, picks = asdict(self.counters), dict(self._picks)
        shelves: dict[str, list[dict[str, Any]]] = {}
        for task_id, shelf in kept_by_task.items():
            for kept in shelf:
                digest = kept.trajectory.digest
                shelves.setdefault(task_id, []).append({"digest": digest, "online": kept.online})
                if not (items / f"{digest}.json").exists():
                    write_atomically(items / f"{digest}.json", canonical(kept.trajectory.as_row()).encode())
        state = {
            "format": _FORMAT,
            "settings": asdict(self.settings),
            "counters": counters,
            "shelves": shelves,
            "picks": picks,
        }
        write_atomically(directory / f"pool-{name}.json", json.dumps(state, indent=1).encode())
        _sweep(directory)

    @classmethod
    def resume(cls, directory: Path, settings: PoolSettings, *, name: str = "latest") -> Self:
        """Return the pool as it was saved: it picks what the saved one would have picked.

        Raises:
            FileNotFoundError: Nothing was saved there by that name, or a file is missing.
            PoolMismatch: It was saved with other settings, or by another release.
        """
        state = json.loads((directory / f"pool-{name}.json").read_bytes())
        if state.get("format") != _FORMAT:
            raise PoolMismatch(f"{directory} holds format {state.get('format')}, this release reads {_FORMAT}")
        wanted = asdict(settings)
        differences = [key for key in wanted if wanted[key] != state["settings"].get(key)]
        if differences:
            told = ", ".join(f"{key} {state['settings'].get(key)} (now {wanted[key]})" for key in differences)
            raise PoolMismatch(
                f"{directory} was saved with {told}; use those settings, or begin with an empty directory"
            )
        shelves = {
            task_id: [
                _Kept(_read(directory / "trajectories" / f"{entry['digest']}.json"), entry["online"])
                for entry in entries
            ]
            for task_id, entries in state["shelves"].items()
        }
        return cls(settings, Counters(**state["counters"]), shelves, dict(state["picks"]))


def write_atomically(path: Path, data: bytes) -> None:
    """Put a file in place whole: after a crash it is what it was, or what it should be."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _read(path: Path) -> StoredTrajectory:
    return StoredTrajectory.from_row(json.loads(path.read_bytes()))


def _sweep(directory: Path) -> None:
    named = {
        entry["digest"]
        for index in directory.glob("pool-*.json")
        for entries in json.loads(index.read_bytes())["shelves"].values()
        for entry in entries
    }
    for path in (directory / "trajectories").glob("*.json"):
        if path.stem not in named:
            path.unlink()
