"""Results of calls, other than observations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from cuaenv.actions import Action
from cuaenv.client.observation import Observation
from cuaenv.copying import copied
from cuaenv.results import CommandResult, UnrecordedRequest
from cuaenv.v1 import env_pb2
from cuaenv.wire import box

__all__ = [
    "Check",
    "Checkpoint",
    "CommandResult",
    "EpisodeInfo",
    "Evaluation",
    "Handover",
    "Origin",
    "Pool",
    "QueuedGroup",
    "ScreenChange",
    "State",
    "StepResult",
    "Task",
    "ToolResult",
    "UnrecordedRequest",
]


class State(Enum):
    """State of an episode."""

    #: Accepts steps.
    ACTIVE = "active"
    #: The agent ended it with done or fail, the guest ended itself, or the task reached a terminal state.
    TERMINATED = "terminated"
    #: Ended by a limit or an evaluation; not terminal in the task.
    TRUNCATED = "truncated"
    #: Lost to a fault of the service; void for training.
    FAILED = "failed"


STATES: Mapping["env_pb2.Episode.State.ValueType", State] = {
    env_pb2.Episode.STATE_ACTIVE: State.ACTIVE,
    env_pb2.Episode.STATE_TERMINATED: State.TERMINATED,
    env_pb2.Episode.STATE_TRUNCATED: State.TRUNCATED,
    env_pb2.Episode.STATE_FAILED: State.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenChange:
    """Changes on the screen during a step, as facts for rewards."""

    base_frame_id: str
    """Frame at the start of the step."""
    changed_fraction: float
    """Share of pixels that differ, in [0, 1]."""
    changed_regions: tuple[tuple[int, int, int, int], ...]
    """Regions (x, y, width, height) that contain all differing pixels."""
    grey_difference: float | None
    """Mean absolute difference in 64x64 grey, in [0, 1]; None unless `View.grey_difference` is set."""


class Handover(NamedTuple):
    """What an agent finds after people acted in its episode."""

    observation: Observation
    actions: tuple[Action, ...]
    """What people did since the agent's last step, oldest first; at most the last 200 actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of an action that uses a tool."""

    output: str
    """Text for the agent, cut if it was long."""
    exit_code: int | None = None
    """Exit code of a shell's command; None if it did not end, and for other tools."""
    timed_out: bool = False
    """Whether a shell's command did not end in time."""
    left_out_bytes: int = 0
    """Bytes of the result that `output` leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step."""

    observation: Observation
    action_errors: tuple[str, ...]
    """One per action: why it failed, as text for the agent; empty if it was performed."""
    state: State
    end_reason: str
    """Why the episode ended, such as AGENT_DONE, MAX_STEPS or GUEST_ENDED; empty while it is active."""
    step_count: int
    timings_ms: Mapping[str, float]
    screen_change: "ScreenChange | None"
    """None unless `View.screen_change` or `View.grey_difference` is set."""
    replayed: bool
    """Whether the response was recorded earlier, because a previous attempt was performed."""
    guest_end_cause: str = ""
    """Cause of the end, such as POWER_OFF or PANIC, if `end_reason` is GUEST_ENDED; otherwise empty."""
    tool_results: tuple[ToolResult | None, ...] = ()
    """One per action: its result if it used a tool, else None."""
    unrecorded_requests: tuple[UnrecordedRequest, ...] = ()
    """What the guest asked for since the step before, and the web recording does not have; at most 20."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Why actions failed, as text for the agent; without entries for actions that were performed."""
        return tuple(filter(None, self.action_errors))

    @property
    def done(self) -> bool:
        """Whether the episode takes no more steps."""
        return self.state is not State.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one checker."""

    name: str
    score: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An episode's score, in [0, 1]."""

    score: float
    checks: tuple[Check, ...]
    timings_ms: Mapping[str, float]
    guest_end_cause: str = ""
    """Cause, such as POWER_OFF or PANIC, if the guest had ended itself before the evaluation; otherwise empty."""
    basis_digest: str = ""
    """Digest of what the score depends on besides the agent. Scores with unlike digests cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task."""

    task_id: str
    instruction: str
    level: int
    """Difficulty; 1 is the easiest."""
    suite: str
    version: int = 1
    """Raised when a change makes scores incomparable with earlier ones."""
    tags: tuple[str, ...] = ()
    max_steps: int = 0
    """Default number of steps after which an episode is truncated."""
    os: str = "linux"
    """Operating system of the guest: `linux` or `windows`."""
    domain: str = ""
    """Subject, such as `editor`."""
    split: str = "train"
    """`train` or `held_out`; the same for all its variants."""
    variant_count: int = 1
    """Number of distinct variants `{task_id}?seed=N`, N from 0 to 2147483647."""
    runnable: bool | None = None
    """Whether a host can run it; None if unknown. A reset of a task that cannot run raises `SetupFailed`."""
    obstacles: tuple[str, ...] = ()
    """Why it cannot run, each `kind: detail`."""
    tools: tuple[str, ...] = ()
    """Tools that it allows, besides those of the pool: `shell`, `files`, `mcp`, `ask_user`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of an episode's first state. Equal origins prove that episodes began in the same state."""

    template_digest: str
    """Digest of the template that its machine was forked from."""
    overlay_parent: str
    """Digest of the disk under its machine's overlay."""
    first_frame_id: str
    """The first frame."""
    is_new_session: bool = False
    """Whether its machine is a new session on the template's files, in which the task's setup ran, instead of a copy:
    equal to the others of its group by construction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Current state of a set of interchangeable machines."""

    name: str
    image: str
    accelerator: str
    capacity: int
    """Most machines that it may hold."""
    idle_count: int
    leased_count: int
    dying_count: int
    """Machines being destroyed; they still hold memory."""
    waiting_count: int
    """Episodes waiting to be admitted."""
    is_failing: bool
    """Whether machines fail to start."""
    problem: str
    """Why machines fail to start; empty if they do not."""
    host: str
    """Its host."""
    os: str = "linux"
    """Operating system of its guests: `linux` or `windows`."""
    starting_count: int = 0
    memory_bytes: int = 0
    """Private dirty memory of its machines, when last measured."""
    always_running: bool = False
    """Guests keep running between calls."""
    queue: tuple["QueuedGroup", ...] = ()
    """Groups that wait, in the order of their turns; empty unless requested."""
    tools: tuple[str, ...] = ()
    """Tools that its agents may use in any task."""
    not_forkable: str = ""
    """Why its episodes can be neither forked nor stored as checkpoints, and what can be; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeInfo:
    """A snapshot of one open episode of any client."""

    episode_id: str
    group_id: str
    """Shared by the episodes of one reset and by their forks."""
    parent_episode_id: str
    """The episode that it was forked from; empty if none."""
    task_id: str
    pool: str
    run: str
    """The label given to its reset."""
    state: State
    end_reason: str
    """Why it is no longer active; empty while it is."""
    step_count: int
    max_steps: int
    create_time: datetime
    expire_time: datetime
    """End of its lease, by its host's clock."""
    host: str
    """Its host."""
    epoch: int = 1
    """1 at first; increases with each rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A stored state of an episode. Pass it to a reset to open episodes in that state."""

    checkpoint_id: str
    label: str
    episode_id: str
    """The episode that was stored; it may have ended."""
    parent_checkpoint_id: str
    """The previous checkpoint of that episode, or the one that it was opened from; empty if none."""
    task_id: str
    pool: str
    run: str
    step_count: int
    """Steps that the episode had performed, with which its copies begin."""
    max_steps: int
    frame_id: str
    """Identifies the screen's pixels."""
    size_bytes: int
    create_time: datetime
    expire_time: datetime
    pinned: bool
    host: str
    """The host that has it."""
    trigger: str = ""
    """Why its episode stored it by itself: steps, branch_point, done or failure; empty if a client asked for it."""
    epoch: int = 1
    """`AsyncEpisode.epoch` of the state."""
    timings_ms: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Duration of the phases of its creation; empty in listings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """A reset or fork that waits for machines."""

    run: str
    machine_count: int
    """Machines that it waits for."""
    position: int
    """Position in the pool's queue; 1 is served next."""
    waited: timedelta
    left: timedelta
    """Time until it is refused."""
    reason: str
    """Why it waits, for people."""


_TRIGGERS = {
    env_pb2.CHECKPOINT_TRIGGER_STEPS: "steps",
    env_pb2.CHECKPOINT_TRIGGER_BRANCH_POINT: "branch_point",
    env_pb2.CHECKPOINT_TRIGGER_DONE: "done",
    env_pb2.CHECKPOINT_TRIGGER_FAILURE: "failure",
}


def read_evaluation(response: env_pb2.EvaluateResponse) -> Evaluation:
    """Return a score from a host's message."""
    checks = tuple(copied(Check, check) for check in response.checks)
    return copied(Evaluation, response, checks=checks, guest_end_cause=response.episode.guest_end_cause)


def read_episode(message: env_pb2.Episode, host: str) -> EpisodeInfo:
    """Return an episode from a host's message. A state newer than this client counts as FAILED."""
    return copied(EpisodeInfo, message, state=STATES.get(message.state, State.FAILED), host=host)


def read_checkpoint(
    message: env_pb2.Checkpoint, host: str, timings_ms: Mapping[str, float] | None = None
) -> Checkpoint:
    trigger = _TRIGGERS.get(message.trigger, "")
    return copied(Checkpoint, message, host=host, trigger=trigger, timings_ms=dict(timings_ms or {}))


def read_pool(message: env_pb2.Pool, host: str) -> Pool:
    return copied(
        Pool,
        message,
        capacity=message.capacity_count,
        is_failing=message.health == env_pb2.Pool.HEALTH_FAILING,
        host=host,
        queue=tuple(copied(QueuedGroup, group) for group in message.queue),
    )


def read_screen_change(response: env_pb2.StepResponse) -> ScreenChange | None:
    """Return what a step changed, or None if that was not requested."""
    if not response.HasField("screen_change"):
        return None
    change = response.screen_change
    return copied(ScreenChange, change, changed_regions=tuple(box(rect) for rect in change.changed_regions))


def read_unrecorded(message: env_pb2.UnrecordedRequest) -> UnrecordedRequest:
    """Return a request that was not recorded."""
    kind = env_pb2.UnrecordedRequest.Kind.Name(message.kind).removeprefix("KIND_").lower()
    return UnrecordedRequest(kind=kind, method=message.method, url=message.url)


def read_tool_result(message: env_pb2.ActionResult) -> ToolResult | None:
    """Return the result of a tool; None for other actions, and for a tool that failed without one."""
    return copied(ToolResult, message) if message.HasField("output") else None
