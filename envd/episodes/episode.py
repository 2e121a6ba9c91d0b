"""One episode: its state, its lease, who controls it, and what its state allows. Never waits; touches no machine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from cuaenv.actions import Action, Done, Fail, Tool
from envd.base.clock import Clock
from envd.base.errors import (
    EpisodeEnded,
    GuestEnded,
    HumanInControl,
    LossUndecided,
    MachineLost,
    StaleEpoch,
    StepIndexMismatch,
)
from envd.episodes.ledger import Ledger
from envd.episodes.progress import EpisodeSpec, EpisodeState, EpisodeStatus, Progress
from envd.pool.leased import LeasedMachine, StandIn
from envd.tasks.model import Task, offered_tools

MAX_CALL_S: Final = 4200.0
"""A call keeps its lease for this long: 64 waits of 60 s, settling for 300 s, and a minute."""

#: The least time that is left for a renewal after the event loop did not run.
_RENEWAL_S = 1.0
#: When a caller that was refused because a person controls the episode may try again.
_RETRY_AFTER_S = 1.0

#: Allowed transitions. A machine can be lost at any time, so only FAILED is final.
_NEXT = {
    EpisodeState.ACTIVE: {EpisodeState.TERMINATED, EpisodeState.TRUNCATED, EpisodeState.FAILED},
    EpisodeState.TERMINATED: {EpisodeState.FAILED},
    EpisodeState.TRUNCATED: {EpisodeState.FAILED},
    EpisodeState.FAILED: set[EpisodeState](),
}


class Lease:
    """How long an episode may keep its machine. Expires after `ttl_s` without a call, and `MAX_CALL_S` later if a call
    is running."""

    def __init__(self, *, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self.expire_s = now_s + ttl_s
        """When it expires if no call renews it or is running, on the monotonic clock."""
        self.idle_since_s = now_s
        """End of the last call, on the monotonic clock."""
        self.expects_idle = False
        """Whether its client has said that no call follows soon."""
        self.call_count = 0
        """Calls that are running."""

    @property
    def reclaim_s(self) -> float:
        """When the machine may be reclaimed, unless a call ends earlier or renews the lease."""
        return self.expire_s + MAX_CALL_S if self.in_call else self.expire_s

    @property
    def in_call(self) -> bool:
        return self.call_count > 0

    def renew(self, now_s: float, *, ttl_s: float | None = None) -> None:
        if ttl_s is not None:
            self.ttl_s = ttl_s
        self.expire_s = now_s + self.ttl_s

    def extend(self, lag_s: float, *, now_s: float) -> None:
        """Add the time in which no call could renew it; if it expired then, leave time for waiting renewals."""
        had_expired = self.expire_s < now_s - lag_s
        self.expire_s += lag_s
        if not had_expired:
            self.expire_s = max(self.expire_s, now_s + _RENEWAL_S)

    def begin_call(self) -> None:
        self.call_count += 1
        self.expects_idle = False

    def end_call(self, now_s: float, *, renews: bool) -> None:
        """Count a call that ended; with `renews`, restart the lease."""
        self.call_count -= 1
        self.idle_since_s = now_s
        if renews:
            self.renew(now_s)

    def has_expired(self, now_s: float) -> bool:
        return now_s >= self.reclaim_s


@dataclass(eq=False, slots=True)
class HumanControl:
    """The control of people over one episode.

    A person's control expires unless the page renews it. Meanwhile the agent's steps and
    evaluations are refused, not queued: they were decided on a screen that is no longer shown. After the person has
    acted, they are also refused until the agent has observed.
    """

    control_id: str = ""
    """Identifies the holder's control; empty while no person controls the episode."""
    holder: str = ""
    """Name of the holder's token; empty without tokens."""
    expire_s: float = 0.0
    """Monotonic time."""
    was_observed: bool = True
    """Whether the agent has observed since a person last acted."""

    def require_agent(self, episode_id: str) -> None:
        """Check that the agent may act. Raises: HumanInControl."""
        if self.control_id:
            why = f"{self.holder or 'a person'} controls it"
        elif not self.was_observed:
            why = "a person has acted since the last observation"
        else:
            return
        raise HumanInControl(
            f"episode {episode_id}: {why}; observe until it is handed back", retry_after_s=_RETRY_AFTER_S
        )

    def require_holder(self, episode_id: str, control_id: str) -> None:
        """Check that a person controls the episode. Raises: HumanInControl: not this one, or no longer."""
        if not control_id or self.control_id != control_id:
            raise HumanInControl(
                f"episode {episode_id}: you do not control it; take control first", retry_after_s=_RETRY_AFTER_S
            )

    def require(self, episode_id: str, control_id: str) -> None:
        """Check that a caller may act: a person, or with an empty id the agent. Raises: HumanInControl."""
        if control_id:
            self.require_holder(episode_id, control_id)
        else:
            self.require_agent(episode_id)

    def acted(self) -> None:
        """Note that a person acted."""
        self.was_observed = False

    def observed(self) -> None:
        """Note that the agent has observed, which counts once no person controls the episode."""
        self.was_observed = self.was_observed or not self.control_id


@dataclass(eq=False, repr=False, kw_only=True)
class Episode:
    """One attempt at one task on one machine."""

    spec: EpisodeSpec
    progress: Progress
    """Replaced whole, never changed."""
    epoch: int = 1
    """Increases with each rollback, so that calls of an earlier attempt are recognised."""
    task: Task
    """The task that its spec names."""
    machine: LeasedMachine
    lease: Lease
    requests: Ledger
    """Its mutating requests, each of which is performed once."""
    pool_tools: tuple[Tool, ...] = ()
    """What its pool allows in any task."""
    human: HumanControl = field(default_factory=HumanControl)
    """Whether a person controls it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the one call that acts on the machine. First come, first served."""
    closed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when the episode is no longer in the registry."""

    def __repr__(self) -> str:
        why = f" ({self.progress.end_reason})" if self.progress.end_reason else ""
        return (
            f"<Episode {self.episode_id} {self.progress.state.value}{why} of {self.spec.task_id} on"
            f" {self.machine.machine_id}, step {self.progress.step_count} of {self.spec.max_steps}>"
        )

    @property
    def episode_id(self) -> str:
        return self.spec.episode_id

    @property
    def tools(self) -> tuple[str, ...]:
        """Tools that the agent can use; see `offered_tools`."""
        return offered_tools(self.task, self.pool_tools)

    def end(self, state: EpisodeState, reason: str, *, cause: str = "") -> None:
        """Move to a later state.

        Args:
            reason: UPPER_SNAKE.
            cause: For FAILED, the cause as a sentence.

        Raises:
            RuntimeError: The transition is not allowed; a bug in the caller.
        """
        if state not in _NEXT[self.progress.state]:
            raise RuntimeError(f"{self!r} cannot become {state.value} ({reason})")
        self.progress = replace(self.progress, state=state, end_reason=reason, cause=cause)

    def count_step(self, last_action: Done | Fail | None) -> bool:
        """Count a performed step; end the episode if it was the last. Returns whether the episode ended."""
        self.progress = self.progress.after_step(last_action)
        if last_action is not None:
            self.end(EpisodeState.TERMINATED, "AGENT_DONE" if isinstance(last_action, Done) else "AGENT_FAIL")
        elif self.progress.step_count >= self.spec.max_steps:
            self.end(EpisodeState.TRUNCATED, "MAX_STEPS")
        return self.progress.state is not EpisodeState.ACTIVE

    def person_acted(self, actions: Sequence[Action]) -> None:
        """Note what a person did: the agent has to observe before its next step."""
        self.progress = self.progress.with_people_actions(actions)
        self.human.acted()

    def go_back(self, machine: LeasedMachine, progress: Progress) -> None:
        """Continue in an earlier state, on a machine that has it. The caller releases the machine before."""
        self.machine, self.progress = machine, progress
        self.epoch += 1

    def stale_error(self) -> StaleEpoch:
        return StaleEpoch(
            f"episode {self.episode_id}: rolled back, and now in epoch {self.epoch} at step"
            f" {self.progress.step_count}; continue from there, or abandon the episode"
        )

    def require_epoch(self, epoch: int) -> None:
        """Check the epoch of a call; 0 fits any. Raises: StaleEpoch."""
        if epoch not in (0, self.epoch):
            raise self.stale_error()

    def require_machine(self) -> None:
        """Check that the episode still has its machine and guest. Raises: MachineLost, GuestEnded."""
        progress = self.progress
        if progress.guest_end_cause:
            raise GuestEnded(
                f"episode {self.episode_id}: its guest ended after step {progress.step_count} ({progress.cause});"
                " evaluate or close it, or reset a new one",
                cause=progress.cause,
            )
        if progress.state is EpisodeState.FAILED:
            raise (LossUndecided if progress.end_reason == LossUndecided.reason else MachineLost)(
                f"episode {self.episode_id}: failed after step {progress.step_count} ({progress.end_reason}:"
                f" {progress.cause}); void the sample, close the episode and reset a new one"
            )

    def require_step(self, step_index: int, *, epoch: int = 0) -> None:
        """Check that the episode accepts this step.

        Raises:
            StaleEpoch, MachineLost, EpisodeEnded, StepIndexMismatch: It does not.
        """
        self.require_epoch(epoch)
        self.require_machine()
        progress = self.progress
        if progress.state is not EpisodeState.ACTIVE:
            raise EpisodeEnded(
                f"episode {self.episode_id}: {progress.state.value} after step {progress.step_count}"
                f" ({progress.end_reason}), accepts no more steps or forks; evaluate or close it, or reset a new one"
            )
        self.human.require_agent(self.episode_id)
        if step_index != progress.step_count:
            raise StepIndexMismatch(
                f"episode {self.episode_id}: expected step_index {progress.step_count}, got {step_index};"
                " another caller may have acted, so abandon the episode"
            )

    def info(self, clock: Clock) -> EpisodeStatus:
        """Return a snapshot."""
        left_s = self.lease.expire_s - clock.monotonic()
        return EpisodeStatus(
            spec=self.spec,
            progress=self.progress,
            epoch=self.epoch,
            expire_time=clock.now() + timedelta(seconds=left_s),
            is_parked=isinstance(self.machine.machine, StandIn) and self.machine.machine.is_parked,
            tools=self.tools,
        )
