"""One episode: its state, its history, and the calls that its state allows. Never waits; touches no machine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from cuaenv.actions import Action, Done, Fail, Tool
from envd.base.clock import Clock
from envd.base.errors import EpisodeEnded, GuestEnded, LossUndecided, MachineLost, StaleEpoch, StepIndexMismatch
from envd.episodes.control import HumanControl
from envd.episodes.lease import Lease
from envd.episodes.ledger import Ledger
from envd.episodes.progress import EpisodeSpec, EpisodeState, Progress
from envd.episodes.types import EpisodeInfo
from envd.pool.leased import LeasedMachine, ParkedMachine
from envd.tasks.model import Task, offered_tools

#: Allowed transitions. A machine can be lost at any time, so only FAILED is final.
_NEXT = {
    EpisodeState.ACTIVE: {EpisodeState.TERMINATED, EpisodeState.TRUNCATED, EpisodeState.FAILED},
    EpisodeState.TERMINATED: {EpisodeState.FAILED},
    EpisodeState.TRUNCATED: {EpisodeState.FAILED},
    EpisodeState.FAILED: set[EpisodeState](),
}


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
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
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

    def info(self, clock: Clock) -> EpisodeInfo:
        """Return a snapshot."""
        left_s = self.lease.expire_s - clock.monotonic()
        return EpisodeInfo(
            spec=self.spec,
            progress=self.progress,
            epoch=self.epoch,
            expire_time=clock.now() + timedelta(seconds=left_s),
            is_parked=isinstance(self.machine.machine, ParkedMachine),
            tools=self.tools,
        )
