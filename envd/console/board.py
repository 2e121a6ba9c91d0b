"""What the console shows of episodes and pools, as JSON objects: read twice a second for all viewers, if there are any.

Texts of clients and guests are passed on as they are: the page must treat every string as text, never as HTML.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from envd.base.clock import Clock
from envd.console.runs import Facts, Runs
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeObserver, PerformedStep
from envd.episodes.service import EpisodeService
from envd.pool.queue import QueueEntry
from envd.pool.status import PoolStatus

#: Reading 256 episodes takes about 3 ms of the event loop.
_INTERVAL_S = 0.5
#: Steps kept of each episode, without pixels; about 300 bytes each.
_MAX_STEPS = 500


@dataclass(eq=False, slots=True)
class Timeline:
    """The latest steps of an episode, those of its ancestors first, and its place in its group."""

    label: str
    """`3` is the third member of its group, `3.1` the first branch of that."""
    first_index: int
    """Index of the first step of its own."""
    steps: deque[PerformedStep]
    branch_count: int = 0


class EpisodeHistory(EpisodeObserver):
    """The timelines of all open episodes, in memory: a restart of the daemon empties it."""

    def __init__(self) -> None:
        self._timelines: dict[str, Timeline] = {}
        self._labels: dict[str, tuple[int, set[str]]] = {}
        """Members opened so far and open episodes, by group."""

    def timeline_of(self, episode_id: str) -> Timeline:
        return self._timelines.get(episode_id) or Timeline("", 0, deque())

    def opened(self, episode: Episode) -> None:
        """Start a timeline; it begins with the steps before a fork or a checkpoint, if their episode is open."""
        member_count, open_ids = self._labels.get(episode.spec.group_id, (0, set()))
        parent = self._timelines.get(episode.spec.parent_episode_id)
        steps: deque[PerformedStep] = deque(maxlen=_MAX_STEPS)
        if parent is None:
            member_count += 1
            label = str(member_count)
        else:
            parent.branch_count += 1
            label = f"{parent.label}.{parent.branch_count}"
        if (source := parent or self._timelines.get(episode.spec.origin.checkpoint_episode_id)) is not None:
            time = (None if parent else episode.spec.origin.checkpoint_time) or episode.spec.create_time
            kept = (step for step in source.steps if step.is_before(step_count=episode.progress.step_count, time=time))
            steps.extend(step for step in kept if not step.is_rolled_back)
        open_ids.add(episode.episode_id)
        self._labels[episode.spec.group_id] = member_count, open_ids
        self._timelines[episode.episode_id] = Timeline(label, episode.progress.step_count, steps)

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        if (timeline := self._timelines.get(episode.episode_id)) is not None:
            timeline.steps.append(replace(step, frame=None))

    def rolled_back(self, episode: Episode, *, time: datetime) -> None:
        if (timeline := self._timelines.get(episode.episode_id)) is not None:
            for at, step in enumerate(timeline.steps):
                if not step.is_before(step_count=episode.progress.step_count, time=time):
                    timeline.steps[at] = replace(step, is_rolled_back=True)

    def closed(self, episode: Episode) -> None:
        """Forget the timeline, and the group with its last episode."""
        self._timelines.pop(episode.episode_id, None)
        _, open_ids = self._labels.get(episode.spec.group_id, (0, set()))
        open_ids.discard(episode.episode_id)
        if not open_ids:
            self._labels.pop(episode.spec.group_id, None)


class Board:
    """Facts by episode, and of the pools. A fact that has not changed stays the same object."""

    def __init__(self, episodes: EpisodeService, history: EpisodeHistory, runs: Runs, *, clock: Clock) -> None:
        self._service = episodes
        self._history = history
        self._runs = runs
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.episodes: dict[str, Facts] = {}
        """Episodes by id, oldest first."""
        self.pools: list[Facts] = []
        self.runs: list[Facts] = []
        """Runs, the newest first."""

    @property
    def now_s(self) -> float:
        """The host's time as a Unix time: leases are shown relative to it."""
        return self._clock.now().timestamp()

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change; the first listener starts the reading."""
        self._listeners.append(changed)
        self.refresh()
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="console:board")

    def unlisten(self, changed: Callable[[], None]) -> None:
        self._listeners.remove(changed)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    def refresh(self) -> None:
        """Read everything now, and report a change."""
        before, pools_before, runs_before = self.episodes, self.pools, self.runs
        self.episodes = {}
        for episode in self._service.episodes:
            episode_id = episode.episode_id
            facts = episode_facts(episode, self._history.timeline_of(episode_id), clock=self._clock)
            known = before.get(episode_id)
            self.episodes[episode_id] = known if known is not None and known == facts else facts
        queues, now_s = self._service.list_queues(), self.now_s
        pools = [pool_facts(pool, queues[pool.name], now_s=now_s) for pool in self._service.list_pools()]
        self.pools = pools_before if pools == pools_before else pools
        runs = self._runs.facts()
        self.runs = runs_before if runs == runs_before else runs
        if (
            self.pools is not pools_before
            or self.runs is not runs_before
            or len(before) != len(self.episodes)
            or any(before.get(episode_id) is not facts for episode_id, facts in self.episodes.items())
        ):
            for changed in self._listeners:
                changed()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.refresh()


def episode_facts(episode: Episode, timeline: Timeline, *, clock: Clock) -> Facts:
    """Return what a tile shows."""
    spec, progress, info = episode.spec, episode.progress, episode.info(clock)
    last = timeline.steps[-1].actions if timeline.steps and timeline.steps[-1].index >= timeline.first_index else ()
    return {
        "id": spec.episode_id,
        "group": spec.group_id,
        "parent": spec.parent_episode_id or spec.origin.checkpoint_episode_id,
        "label": timeline.label,
        "first": timeline.first_index,
        "task": spec.task_id,
        "pool": spec.pool,
        "run": spec.run,
        "owner": spec.owner,
        "state": progress.state.value,
        "reason": progress.end_reason,
        "step": progress.step_count,
        "max_steps": spec.max_steps,
        "checkpoint": progress.last_checkpoint_id,
        "created": round(spec.create_time.timestamp()),
        # Whole seconds: the exact value differs with every reading.
        "expires": round(info.expire_time.timestamp()),
        "lease_s": episode.lease.ttl_s,
        "in_call": episode.lease.in_call,
        "parked": info.is_parked,
        "action": last[-1] if last else "",
        "score": None if progress.score is None else progress.score.score,
    }


def episode_detail(episode: Episode, facts: Facts, timeline: Timeline, checkpoints: Iterable[Manifest]) -> Facts:
    """Return what the full view shows, with the checkpoints of its tree."""
    score = episode.progress.score
    return {
        **facts,
        "checkpoints": [
            {
                "id": each.checkpoint_id,
                "parent": each.progress.last_checkpoint_id,
                "episode": each.spec.episode_id,
                "step": each.progress.step_count,
                "label": each.label or each.trigger.replace("_", " "),
            }
            for each in checkpoints
        ],
        "instruction": episode.task.instruction,
        "machine": episode.machine.machine_id,
        "cause": episode.progress.cause,
        "checks": [
            {"name": check.name, "score": check.score, "evidence": check.evidence}
            for check in (() if score is None else score.checks)
        ],
        "evaluator_error": episode.progress.evaluator_error,
        "steps": [
            {
                "index": step.index,
                "time": step.time.timestamp(),
                "source": step.source,
                "actions": list(step.actions),
                "unrecorded": list(step.unrecorded),
                "settled": step.is_settled,
                "rolled_back": step.is_rolled_back,
                "ms": round(step.total_ms),
            }
            for step in timeline.steps
        ],
    }


def pool_facts(pool: PoolStatus, queue: Iterable[QueueEntry], *, now_s: float) -> Facts:
    """Return what the page shows of a pool and its queue, at a Unix time."""
    return {
        "name": pool.name,
        "image": pool.image,
        "accelerator": pool.accelerator,
        "resident": pool.resident,
        "leased": pool.leased_count,
        "idle": pool.idle_count,
        "starting": pool.starting_count,
        "dying": pool.dying_count,
        "reserved": pool.reserved_count,
        "parked": pool.parked_count,
        "waiting": pool.waiting_count,
        "held_by_run": dict(pool.held_by_run),
        "healthy": pool.healthy,
        "problem": pool.problem,
        "queue": [
            {
                "run": group.run,
                "owner": group.owner,
                "machines": group.machine_count,
                "since": round(now_s - group.waited_s),
                "why": group.reason,
            }
            for group in queue
        ],
    }
