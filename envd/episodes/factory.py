"""Create episodes from machines at the start of a task, all at once. Never waits: ownership moves in one step."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from envd.base.store.store import EpisodeRow
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode, HumanControl, Lease
from envd.episodes.journal import StoredEpisode
from envd.episodes.ledger import Ledger
from envd.episodes.members import Group
from envd.episodes.progress import EpisodeSpec
from envd.pool.leased import LeasedMachine
from envd.pool.pool import Pool
from envd.tasks.basis import task_digest
from envd.tasks.model import Task

logger = logging.getLogger(__name__)


def create(
    group: Group, specs: Sequence[EpisodeSpec], *, pool: Pool, task: Task, lease_ttl_s: float, context: EpisodeContext
) -> tuple[Episode, ...]:
    """Create an episode per machine; their leases start now, and the registry releases the machines from now on."""
    episodes = []
    for member, spec in zip(group.members, specs, strict=True):
        episode = Episode(
            spec=spec,
            progress=group.progress,
            task=task,
            pool_tools=pool.settings.tools,
            machine=member.machine,
            lease=Lease(ttl_s=lease_ttl_s, now_s=context.clock.monotonic()),
            requests=_new_ledger(spec.episode_id, context),
        )
        context.registry.add(episode, pool)
        logger.info(
            "episode %s: opened%s, task %s, machine %s, group %s%s",
            spec.episode_id,
            f" by {spec.owner}" if spec.owner else "",
            spec.task_id,
            member.machine.machine_id,
            spec.group_id,
            f", a fork of {spec.parent_episode_id}" if spec.parent_episode_id else "",
        )
        episodes.append(episode)
    return tuple(episodes)


def restore(
    row: EpisodeRow, stored: StoredEpisode, *, machine: LeasedMachine, pool: Pool, task: Task, context: EpisodeContext
) -> Episode:
    """Recreate an episode of a previous daemon in its persisted state, with the rest of its lease.

    The task may have another definition since. An agent that a person interrupted has to observe again.
    """
    now_s = context.clock.monotonic()
    lease = Lease(ttl_s=row.lease_ttl_s, now_s=now_s)
    left_s = row.expire_time_s - context.clock.now().timestamp()
    lease.expire_s = now_s + min(left_s, row.lease_ttl_s)
    episode = Episode(
        spec=replace(stored.spec, task_digest=task_digest(task)),
        progress=stored.progress,
        epoch=row.epoch,
        task=task,
        pool_tools=pool.settings.tools,
        machine=machine,
        lease=lease,
        requests=_new_ledger(row.episode_id, context),
        human=HumanControl(was_observed=not stored.progress.people_actions),
    )
    context.registry.add(episode, pool)
    return episode


def _new_ledger(episode_id: str, context: EpisodeContext) -> Ledger:
    return Ledger(
        clock=context.clock,
        abandoned=lambda: context.registry.not_found(episode_id),
        on_dropped=context.journal.forget_answer,
        close_group=context.registry.close_group,
    )
