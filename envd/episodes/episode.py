"""One episode: its state, its history, and the calls that its state allows. Never waits; touches no machine."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from cuaenv.actions import Done, Fail, Tool
from cuaenv.copying import copied
from envd.base.clock import Clock
from envd.base.config import SettlePolicy
from envd.base.errors import (
    EpisodeEnded,
    EvaluatorFailed,
    GuestEnded,
    LossUndecided,
    MachineLost,
    StaleEpoch,
    StepIndexMismatch,
)
from envd.base.losses import ENDS_MACHINE
from envd.episodes.checkpoints.store import Checkpoint
from envd.episodes.control import HumanControl
from envd.episodes.lease import Lease
from envd.episodes.ledger import Ledger
from envd.episodes.types import NO_CHECKPOINTS, AutomaticCheckpoints, EpisodeInfo, EpisodeState, EvaluateResult, Origin
from envd.pool.leased import LeasedMachine
from envd.tasks.model import Task, offered_tools
from envd.tasks.user import Exchange

#: Allowed transitions. A machine can be lost at any time, so only FAILED is final.
_NEXT = {
    EpisodeState.ACTIVE: {EpisodeState.TERMINATED, EpisodeState.TRUNCATED, EpisodeState.FAILED},
    EpisodeState.TERMINATED: {EpisodeState.FAILED},
    EpisodeState.TRUNCATED: {EpisodeState.FAILED},
    EpisodeState.FAILED: set[EpisodeState](),
}


@dataclass(eq=False, repr=False, kw_only=True)
class Episode:
    """One attempt at one task on one machine. Active at first, at step 0 or at its parent's step."""

    episode_id: str
    group_id: str
    parent_episode_id: str
    origin: Origin
    task: Task
    pool: str
    run: str
    owner: str
    max_steps: int
    settle: SettlePolicy
    machine: LeasedMachine
    lease: Lease
    create_time: datetime
    requests: Ledger
    """Its mutating requests, each of which is performed once."""
    pool_tools: tuple[Tool, ...] = ()
    """What its pool allows in any task."""
    asked: tuple[Exchange, ...] = ()
    """What the agent has asked the task's user."""
    automatic: AutomaticCheckpoints = NO_CHECKPOINTS
    step_count: int = 0
    """Number of steps performed, which is the index of the next step."""
    epoch: int = 1
    """Increases with each rollback, so that calls of an earlier attempt are recognised."""
    last_checkpoint_id: str = ""
    """The checkpoint that its present state descends from; empty if none."""
    verdict: EvaluateResult | EvaluatorFailed | None = None
    """The result of the checkers, which run once."""
    last_action: Done | Fail | None = None
    """The action with which the agent ended the episode."""
    state: EpisodeState = EpisodeState.ACTIVE
    """Changed only by `end` and `go_back`."""
    end_reason: str = ""
    """Why it is no longer active, UPPER_SNAKE; empty while it is."""
    cause: str = ""
    """Why it FAILED, as a sentence; if its guest ended, the UPPER_SNAKE cause; otherwise empty."""
    human: HumanControl = field(default_factory=HumanControl, init=False)
    """Whether a person controls it, and what people did since the agent's last step."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the one call that acts on the machine. First come, first served."""
    closed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when the episode is no longer in the registry."""

    def __repr__(self) -> str:
        why = f" ({self.end_reason})" if self.end_reason else ""
        return (
            f"<Episode {self.episode_id} {self.state.value}{why} of {self.task.task_id} on {self.machine.machine_id},"
            f" step {self.step_count} of {self.max_steps}>"
        )

    @property
    def guest_end_cause(self) -> str:
        """Cause if the guest ended itself, such as POWER_OFF; otherwise empty."""
        return "" if self.state is EpisodeState.FAILED else self.cause

    @property
    def has_score(self) -> bool:
        """Whether no failure can void it: it was scored, or its guest ended its machine, which scores 0."""
        return isinstance(self.verdict, EvaluateResult) or self.guest_end_cause in ENDS_MACHINE

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
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self!r} cannot become {state.value} ({reason})")
        self.state, self.end_reason, self.cause = state, reason, cause

    def count_step(self, last_action: Done | Fail | None) -> bool:
        """Count a performed step; end the episode if it was the last. Returns whether the episode ended."""
        self.step_count += 1
        if last_action is not None:
            self.last_action = last_action
            self.end(EpisodeState.TERMINATED, "AGENT_DONE" if isinstance(last_action, Done) else "AGENT_FAIL")
        elif self.step_count >= self.max_steps:
            self.end(EpisodeState.TRUNCATED, "MAX_STEPS")
        return self.state is not EpisodeState.ACTIVE

    def go_back(self, machine: LeasedMachine, checkpoint: Checkpoint) -> None:
        """Continue in the state of a checkpoint, on a machine that has it. The caller releases the machine before."""
        self.machine, self.last_checkpoint_id = machine, checkpoint.checkpoint_id
        self.step_count, self.asked = checkpoint.step_count, checkpoint.asked
        # It may be a checkpoint of another episode of the task, in another world.
        self.origin = replace(self.origin, perturbations=checkpoint.perturbations)
        self.epoch += 1
        self.verdict = self.last_action = None
        self.human.actions.clear()
        self.state, self.end_reason, self.cause = EpisodeState.ACTIVE, "", ""

    def stale_error(self) -> StaleEpoch:
        return StaleEpoch(
            f"episode {self.episode_id}: rolled back, and now in epoch {self.epoch} at step {self.step_count}; continue"
            " from there, or abandon the episode"
        )

    def require_epoch(self, epoch: int) -> None:
        """Check the epoch of a call; 0 fits any. Raises: StaleEpoch."""
        if epoch not in (0, self.epoch):
            raise self.stale_error()

    def require_machine(self) -> None:
        """Check that the episode still has its machine and guest. Raises: MachineLost, GuestEnded."""
        if self.guest_end_cause:
            raise GuestEnded(
                f"episode {self.episode_id}: its guest ended after step {self.step_count} ({self.cause});"
                " evaluate or close it, or reset a new one",
                cause=self.cause,
            )
        if self.state is EpisodeState.FAILED:
            raise (LossUndecided if self.end_reason == LossUndecided.reason else MachineLost)(
                f"episode {self.episode_id}: failed after step {self.step_count} ({self.end_reason}: {self.cause});"
                " void the sample, close the episode and reset a new one"
            )

    def require_step(self, step_index: int, *, epoch: int = 0) -> None:
        """Check that the episode accepts this step.

        Raises:
            StaleEpoch, MachineLost, EpisodeEnded, StepIndexMismatch: It does not.
        """
        self.require_epoch(epoch)
        self.require_machine()
        if self.state is not EpisodeState.ACTIVE:
            raise EpisodeEnded(
                f"episode {self.episode_id}: {self.state.value} after step {self.step_count} ({self.end_reason}),"
                " accepts no more steps or forks; evaluate or close it, or reset a new one"
            )
        self.human.require_agent(self.episode_id)
        if step_index != self.step_count:
            raise StepIndexMismatch(
                f"episode {self.episode_id}: expected step_index {self.step_count}, got {step_index};"
                " another caller may have acted, so abandon the episode"
            )

    def info(self, clock: Clock) -> EpisodeInfo:
        """Return a snapshot."""
        left_s = self.lease.expire_s - clock.monotonic()
        expire_time = clock.now() + timedelta(seconds=left_s)
        return copied(EpisodeInfo, self, task_id=self.task.task_id, expire_time=expire_time)
