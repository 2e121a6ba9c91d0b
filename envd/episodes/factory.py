"""Create episodes from machines at the start of a task, all at once. Never waits: ownership moves in one step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from cuaenv.copying import copied
from envd.base.clock import Clock
from envd.base.config import SettlePolicy
from envd.base.store.statements import EpisodeRow
from envd.episodes.episode import Episode
from envd.episodes.lease import Lease
from envd.episodes.ledger import Ledger
from envd.episodes.members import Group, Member
from envd.episodes.persistence.journal import Journal
from envd.episodes.persistence.records import EpisodeSnapshot
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.types import AutomaticCheckpoints
from envd.pool.leased import LeasedMachine
from envd.pool.pool import Pool
from envd.tasks.model import Task
from envd.tasks.user import Exchange

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeParams:
    """Parameters shared by all episodes of one reset or fork."""

    group_id: str
    parent_episode_id: str = ""
    """Empty if none."""
    task: Task
    run: str
    owner: str
    max_steps: int
    step_count: int = 0
    asked: tuple[Exchange, ...] = ()
    settle: SettlePolicy
    lease_ttl_s: float
    automatic: AutomaticCheckpoints
    last_checkpoint_id: str = ""
    """The checkpoint that their state descends from; empty if none."""

    @classmethod
    def of_fork(cls, parent: Episode, *, step_count: int, lease_ttl_s: float) -> Self:
        """Return the parameters of an episode's forks."""
        return copied(cls, parent, parent_episode_id=parent.episode_id, step_count=step_count, lease_ttl_s=lease_ttl_s)


class EpisodeFactory:
    """Creates episodes and adds them to a registry."""

    def __init__(
        self, registry: EpisodeRegistry, *, journal: Journal, clock: Clock, make_id: Callable[[], str]
    ) -> None:
        self._registry = registry
        self._journal = journal
        self._clock = clock
        self._make_id = make_id

    def new_group_id(self) -> str:
        return f"group-{self._make_id()}"

    def create(self, group: Group, pool: Pool, params: EpisodeParams) -> tuple[Episode, ...]:
        """Create an episode per machine; their leases start now, and the registry releases the machines from now on."""
        return tuple(self._create_one(member, pool, params) for member in group.members)

    def _create_one(self, member: Member, pool: Pool, params: EpisodeParams) -> Episode:
        episode_id = f"ep-{self._make_id()}"
        episode = copied(
            Episode,
            params,
            episode_id=episode_id,
            origin=member.origin,
            pool=pool.name,
            pool_tools=pool.settings.tools,
            machine=member.machine,
            lease=Lease(ttl_s=params.lease_ttl_s, now_s=self._clock.monotonic()),
            create_time=self._clock.now(),
            requests=self._new_ledger(episode_id),
        )
        self._registry.add(episode, pool)
        logger.info(
            "episode %s: opened%s, task %s, machine %s, group %s%s",
            episode_id,
            f" by {params.owner}" if params.owner else "",
            params.task.task_id,
            member.machine.machine_id,
            params.group_id,
            f", a fork of {params.parent_episode_id}" if params.parent_episode_id else "",
        )
        return episode

    def restore(
        self, row: EpisodeRow, snapshot: EpisodeSnapshot, *, machine: LeasedMachine, pool: Pool, task: Task
    ) -> Episode:
        """Recreate an episode of a previous daemon in its persisted state, with the rest of its lease."""
        now_s = self._clock.monotonic()
        lease = Lease(ttl_s=row.lease_ttl_s, now_s=now_s)
        left_s = row.expire_time_s - self._clock.now().timestamp()
        lease.expire_s = now_s + min(left_s, row.lease_ttl_s)
        episode = copied(
            Episode,
            snapshot,
            row,
            task=task,
            pool=pool.name,
            pool_tools=pool.settings.tools,
            machine=machine,
            lease=lease,
            requests=self._new_ledger(row.episode_id),
        )
        self._registry.add(episode, pool)
        return episode

    def _new_ledger(self, episode_id: str) -> Ledger:
        return Ledger(
            clock=self._clock,
            abandoned=lambda: self._registry.not_found(episode_id),
            on_dropped=self._journal.forget_answer,
            close_group=self._registry.close_group,
        )
