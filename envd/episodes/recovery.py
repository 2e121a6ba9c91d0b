"""Decide which episodes of a previous daemon resume, which are lost, and which have expired; then recover them.

An episode resumes only if its machine outlived the daemon in the recorded state. The effect of a request that was
running when the daemon died is unknown: the request is never repeated, and its episode is void.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from envd.base.clock import Clock
from envd.base.errors import EnvdError, MachineLost
from envd.base.store.store import AnswerRow, EpisodeRow, Store, is_well_typed
from envd.episodes.checkpoints.parking import is_parked
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode, HumanControl, Lease
from envd.episodes.journal import StoredEpisode, load, stored_in
from envd.episodes.ledger import EVALUATE, FORK, RESET, ROLLBACK, STEP, RequestKey, RequestKind
from envd.episodes.progress import EpisodeSpec, EpisodeState
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.types import EvaluateResult, OpenedGroup, RollbackResult, StepOutcome
from envd.hypervisor.machine import Machine
from envd.pool.leased import LeasedMachine, lost_machine
from envd.pool.pool import MachinePool
from envd.tasks.basis import task_digest
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task

logger = logging.getLogger(__name__)

#: A day, which is longer than any lease; and the year 9000 in seconds since 1970.
_MAX_LEASE_S: Final = 86_400.0
_MAX_TIME_S: Final = 2.2e11

#: Requests whose responses are recorded, and the type of these.
_RECORDED: Final[Mapping[str, tuple[RequestKind, type[Any]]]] = {
    kind.name: (kind, result_type)
    for kind, result_type in (
        (RESET, OpenedGroup),
        (STEP, StepOutcome),
        (EVALUATE, EvaluateResult),
        (FORK, OpenedGroup),
        (ROLLBACK, RollbackResult),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """The outcome for one episode, and why."""

    row: EpisodeRow
    stored: StoredEpisode | None
    """None if it expired."""
    outcome: Literal["resume", "lost", "expired"]
    """`resume`: it continues if its machine still exists, else it is lost. `lost`: it failed, or the effect of its last
    request is unknown: it stays, without a machine, so that calls report why. `expired`: it is closed."""
    why: str
    """The cause (lost), or the problem that later calls report (expired); else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistedState:
    """The state that a previous daemon left in the database."""

    decisions: tuple[RecoveryDecision, ...]
    answers: tuple[AnswerRow, ...]
    """Oldest first; without those that were still running."""

    @property
    def machine_ids(self) -> frozenset[str]:
        """Machines worth adopting."""
        return frozenset(d.row.machine_id for d in self.decisions if d.outcome == "resume")


async def load_persisted(store: Store, *, clock: Clock, pools: Collection[str], tasks: TaskCatalogue) -> PersistedState:
    """Read the database and decide. Changes nothing. Raises: StoreError."""
    rows = await store.rows(EpisodeRow)
    answers = sorted(filter(is_well_typed, await store.rows(AnswerRow)), key=lambda answer: answer.time_s)
    running: defaultdict[str, list[AnswerRow]] = defaultdict(list)
    for answer in answers:
        if not answer.answer:
            running[answer.scope].append(answer)
    now_s = clock.now().timestamp()

    def is_served(spec: EpisodeSpec) -> bool:
        return spec.pool in pools and tasks.find(spec.task_id) is not None

    decisions = tuple(decide(row, running[row.episode_id], now_s=now_s, is_served=is_served) for row in rows)
    return PersistedState(decisions=decisions, answers=tuple(answer for answer in answers if answer.answer))


def decide(
    row: EpisodeRow, running: Sequence[AnswerRow], *, now_s: float, is_served: Callable[[EpisodeSpec], bool]
) -> RecoveryDecision:
    """Decide what happens to one episode.

    Args:
        now_s: Seconds since 1970.
        is_served: Returns whether this daemon has an episode's pool and task.
    """

    def expired(why: str) -> RecoveryDecision:
        return RecoveryDecision(row=row, stored=None, outcome="expired", why=why)

    def lost(why: str) -> RecoveryDecision:
        return RecoveryDecision(row=row, stored=stored, outcome="lost", why=why)

    if not is_well_typed(row) or not _is_in_range(row):
        logger.warning("episode %s: its database row has a value of a wrong type or size", row.episode_id)
        return expired("its record in the database was damaged")
    # A lease does not expire during a call.
    if row.expire_time_s <= now_s and not running:
        return expired("closed because its lease expired while no daemon ran")
    try:
        stored = stored_in(row)
    except ValueError as error:
        logger.warning("episode %s: its database row cannot be read: %s", row.episode_id, error)
        return expired("persisted by an incompatible release of envd")
    spec, progress = stored.spec, stored.progress
    if not is_served(spec):
        return expired(
            f"ended with a daemon that served pool {spec.pool!r} and task {spec.task_id!r}; this one does not"
        )
    if progress.state is EpisodeState.FAILED:
        return lost(progress.cause)
    if running:
        requests = " and ".join(f"{answer.kind} {answer.request_id}" for answer in running)
        return lost(f"the daemon restarted during {requests}; its effect is unknown")
    if stored.connection.is_holding and not is_parked(row.machine_id):
        return lost("the daemon restarted while a key or button was held down, and it is no longer held")
    return RecoveryDecision(row=row, stored=stored, outcome="resume", why="")


def _is_in_range(row: EpisodeRow) -> bool:
    """Return whether responses can contain the numbers of a row, which may be infinite or NaN."""
    has_lease = 0 <= row.lease_ttl_s <= _MAX_LEASE_S and abs(row.expire_time_s) <= _MAX_TIME_S
    return has_lease and 1 <= row.epoch < 1 << 31


async def recover(state: PersistedState, machines: Mapping[str, Machine], *, context: EpisodeContext) -> None:
    """Recover every episode that has not expired, with its responses, into a service that has none yet."""
    recovering = (_recover_episode(decision, machines, context) for decision in state.decisions)
    await asyncio.gather(*recovering)
    for answer in state.answers:
        _recover_answer(answer, context)


async def _recover_episode(
    decision: RecoveryDecision, machines: Mapping[str, Machine], context: EpisodeContext
) -> None:
    row, stored = decision.row, decision.stored
    if stored is None:
        context.registry.remember_closed(row.episode_id, decision.why, owner=row.owner)
        context.journal.forget(row.episode_id)
        return
    pool = context.pools[stored.spec.pool]
    why, leased = decision.why, None
    if decision.outcome == "resume":
        machine = machines.get(row.machine_id)
        why = "the daemon restarted, and machines on this host do not outlive it"
        try:
            leased = await context.parking.find(row.machine_id, pool)
            if leased is None and machine is not None:
                leased = await pool.adopt(machine, stored.connection, run=stored.spec.run)
        except EnvdError as error:
            why = f"the daemon restarted and could not adopt the machine: {error}"
    episode = _recreated(
        row,
        stored,
        machine=leased or lost_machine(pool.spec_of(row.machine_id), reason=why),
        pool=pool,
        task=context.tasks.get(stored.spec.task_id),
        context=context,
    )
    context.journal.track(episode)
    context.parking.keep(episode)
    if leased is None:
        # A full lease, at no cost without a machine: a late caller still learns why its episode was lost.
        episode.lease.renew(context.clock.monotonic())
        context.registry.void(episode, MachineLost(why))
    logger.info(
        "episode %s: recovered after step %d: %s",
        episode.episode_id,
        episode.progress.step_count,
        "resumed" if leased else why,
    )


def _recreated(
    row: EpisodeRow,
    stored: StoredEpisode,
    *,
    machine: LeasedMachine,
    pool: MachinePool,
    task: Task,
    context: EpisodeContext,
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
        requests=context.new_ledger(row.episode_id),
        human=HumanControl(was_observed=not stored.progress.people_actions),
    )
    context.registry.add(episode, pool)
    return episode


def _recover_answer(row: AnswerRow, context: EpisodeContext) -> None:
    if row.kind not in _RECORDED:
        return
    kind, result_type = _RECORDED[row.kind]
    episode = context.registry.find(row.scope)
    if episode is None and kind is not RESET:
        return  # deleted with its episode
    request = RequestKey(kind, row.scope, row.request_id, row.fingerprint)
    try:
        result = load(result_type, row.answer)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s %s: its response cannot be read: %s", row.kind, row.request_id, error)
        context.journal.forget_answer(request)
        return
    if isinstance(result, OpenedGroup) and not _is_left(result, context.registry):
        # A caller that retries, and so has no response yet, gets a new group.
        context.journal.forget_answer(request)
        return
    ledger = context.requests if episode is None else episode.requests
    ledger.recover(request, result, age_s=max(0.0, context.clock.now().timestamp() - row.time_s))


def _is_left(group: OpenedGroup, registry: EpisodeRegistry) -> bool:
    """Return whether an episode of a group still has its machine."""
    episodes = [registry.find(info.episode_id) for info in group.episodes]
    return any(episode is not None and not episode.machine.lost.is_set() for episode in episodes)
