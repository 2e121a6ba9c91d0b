"""Make machines that stand at their start episodes, all at once. Never waits: a machine is the pool's, then theirs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from envd.episodes.episode import Episode
from envd.episodes.lease import Lease
from envd.episodes.ledger import Ledger
from envd.episodes.limits import EpisodeLimits
from envd.episodes.members import Member
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.types import EpisodeInfo
from envd.errors import EpisodeEnded, InvalidRequest, StepIndexMismatch
from envd.guest.observation import SettlePolicy
from envd.pool.clock import Clock
from envd.pool.pool import Pool
from envd.tasks.model import Task

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upbringing:
    """What the episodes of one reset or fork have in common."""

    group_id: str
    parent_episode_id: str
    """Empty if none."""
    task: Task
    run: str
    owner: str
    max_steps: int
    step_count: int
    settle: SettlePolicy
    lease_ttl_s: float

    @classmethod
    def of_fork(cls, parent: Episode, *, step_count: int, lease_ttl_s: float) -> Self:
        """Return what copies of an episode take over from it."""
        return cls(
            group_id=parent.group_id,
            parent_episode_id=parent.episode_id,
            task=parent.task,
            run=parent.run,
            owner=parent.owner,
            max_steps=parent.max_steps,
            step_count=step_count,
            settle=parent.settle,
            lease_ttl_s=lease_ttl_s,
        )


class Adoption:
    """Makes episodes and enters them in a registry."""

    def __init__(
        self, registry: EpisodeRegistry, *, limits: EpisodeLimits, clock: Clock, make_id: Callable[[], str]
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._clock = clock
        self._make_id = make_id

    def new_group_id(self) -> str:
        """Return an id for a group."""
        return f"group-{self._make_id()}"

    def adopt(self, members: Sequence[Member], pool: Pool, upbringing: Upbringing) -> tuple[EpisodeInfo, ...]:
        """Make machines episodes; their leases start now, and from now on they are the registry's to release."""
        return tuple(self._adopt_one(member, pool, upbringing) for member in members)

    def _adopt_one(self, member: Member, pool: Pool, upbringing: Upbringing) -> EpisodeInfo:
        episode_id = f"ep-{self._make_id()}"
        episode = Episode(
            episode_id=episode_id,
            group_id=upbringing.group_id,
            parent_episode_id=upbringing.parent_episode_id,
            origin=member.origin,
            task=upbringing.task,
            pool=pool.name,
            run=upbringing.run,
            owner=upbringing.owner,
            max_steps=upbringing.max_steps,
            step_count=upbringing.step_count,
            settle=upbringing.settle,
            machine=member.machine,
            lease=Lease(ttl_s=upbringing.lease_ttl_s, now_s=self._clock.monotonic()),
            create_time=self._clock.now(),
            steps=self._new_ledger(episode_id, "step", (StepIndexMismatch, EpisodeEnded, InvalidRequest)),
            evaluations=self._new_ledger(episode_id, "evaluate", ()),
            # A fork that failed handed out nothing, whatever went wrong.
            forks=self._new_ledger(episode_id, "fork", (Exception,)),
        )
        self._registry.add(episode, pool)
        logger.info(
            "episode %s: opened%s, task %s, machine %s, group %s%s",
            episode_id,
            f" by {upbringing.owner}" if upbringing.owner else "",
            upbringing.task.task_id,
            member.machine.machine_id,
            upbringing.group_id,
            f", a fork of {upbringing.parent_episode_id}" if upbringing.parent_episode_id else "",
        )
        return episode.info(self._clock)

    def _new_ledger(self, episode_id: str, name: str, without_effect: tuple[type[Exception], ...]) -> Ledger[T]:
        return Ledger(
            f"{name}:{episode_id}",
            clock=self._clock,
            keep_s=self._limits.ledger_keep_s,
            keep_count=self._limits.ledger_step_count,
            without_effect=without_effect,
            abandoned=lambda: self._registry.not_found(episode_id),
        )
