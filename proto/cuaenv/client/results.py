"""Results of calls, other than observations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cuaenv.actions import Action
from cuaenv.client.observation import Observation
from cuaenv.results import CommandResult, State, UnrecordedRequest
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
    "Server",
    "State",
    "StepResult",
    "Task",
    "ToolResult",
    "UnrecordedRequest",
]


_STATES: Mapping["env_pb2.Episode.State.ValueType", State] = {
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
class Server:
    """A daemon's release, what it adds to the contract, and its limits."""

    host: str
    """Its host."""
    release: str
    """Version of envd, such as `0.3.0`."""
    capabilities: frozenset[str]
    """Names of `cuaenv.capabilities`."""
    default_lease_ttl: timedelta
    max_lease_ttl: timedelta
    max_steps: int
    """Most steps of an episode."""
    max_machine_count: int | None
    """Most machines that the token's episodes may hold; None if it has no limit of its own."""


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
    parked_count: int = 0
    """Open episodes without a machine, which count toward `capacity`."""
    resident_count: int = 0
    """Most machines at once; below `capacity` if idle episodes are parked."""


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
    is_parked: bool = False
    """Whether it has no machine now: its state is on its host's disk."""


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


def state_of(episode: env_pb2.Episode) -> State:
    """Return an episode's state. One newer than this client counts as FAILED."""
    return _STATES.get(episode.state, State.FAILED)


def read_server(message: env_pb2.Server, host: str) -> Server:
    return Server(
        host=host,
        release=message.release,
        capabilities=frozenset(message.capabilities),
        default_lease_ttl=message.default_lease_ttl.ToTimedelta(),
        max_lease_ttl=message.max_lease_ttl.ToTimedelta(),
        max_steps=message.max_steps,
        max_machine_count=message.max_machine_count if message.HasField("max_machine_count") else None,
    )


def read_task(message: env_pb2.Task) -> Task:
    return Task(
        task_id=message.task_id,
        instruction=message.instruction,
        level=message.level,
        suite=message.suite,
        version=message.version,
        tags=tuple(message.tags),
        max_steps=message.max_steps,
        os=message.os,
        domain=message.domain,
        split=message.split,
        variant_count=message.variant_count,
        runnable=message.runnable if message.HasField("runnable") else None,
        obstacles=tuple(message.obstacles),
        tools=tuple(message.tools),
    )


def read_evaluation(response: env_pb2.EvaluateResponse) -> Evaluation:
    """Return a score from a host's message."""
    return Evaluation(
        score=response.score,
        checks=tuple(Check(name=check.name, score=check.score, evidence=check.evidence) for check in response.checks),
        timings_ms=dict(response.timings_ms),
        guest_end_cause=response.episode.guest_end_cause,
        basis_digest=response.basis_digest,
    )


def read_episode(message: env_pb2.Episode, host: str) -> EpisodeInfo:
    """Return an episode from a host's message."""
    return EpisodeInfo(
        episode_id=message.episode_id,
        group_id=message.group_id,
        parent_episode_id=message.parent_episode_id,
        task_id=message.task_id,
        pool=message.pool,
        run=message.run,
        state=state_of(message),
        end_reason=message.end_reason,
        step_count=message.step_count,
        max_steps=message.max_steps,
        create_time=message.create_time.ToDatetime(UTC),
        expire_time=message.expire_time.ToDatetime(UTC),
        host=host,
        epoch=message.epoch,
        is_parked=message.parked,
    )


def read_origin(message: env_pb2.Origin) -> Origin:
    return Origin(
        template_digest=message.template_digest,
        overlay_parent=message.overlay_parent,
        first_frame_id=message.first_frame_id,
        is_new_session=message.is_new_session,
    )


def read_checkpoint(
    message: env_pb2.Checkpoint, host: str, timings_ms: Mapping[str, float] | None = None
) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=message.checkpoint_id,
        label=message.label,
        episode_id=message.episode_id,
        parent_checkpoint_id=message.parent_checkpoint_id,
        task_id=message.task_id,
        pool=message.pool,
        run=message.run,
        step_count=message.step_count,
        max_steps=message.max_steps,
        frame_id=message.frame_id,
        size_bytes=message.size_bytes,
        create_time=message.create_time.ToDatetime(UTC),
        expire_time=message.expire_time.ToDatetime(UTC),
        pinned=message.pinned,
        host=host,
        trigger=_TRIGGERS.get(message.trigger, ""),
        epoch=message.epoch,
        timings_ms=dict(timings_ms or {}),
    )


def read_pool(message: env_pb2.Pool, host: str) -> Pool:
    return Pool(
        name=message.name,
        image=message.image,
        accelerator=message.accelerator,
        capacity=message.capacity_count,
        idle_count=message.idle_count,
        leased_count=message.leased_count,
        dying_count=message.dying_count,
        waiting_count=message.waiting_count,
        is_failing=message.health == env_pb2.Pool.HEALTH_FAILING,
        problem=message.problem,
        host=host,
        os=message.os,
        starting_count=message.starting_count,
        memory_bytes=message.memory_bytes,
        always_running=message.always_running,
        queue=tuple(
            QueuedGroup(
                run=group.run,
                machine_count=group.machine_count,
                position=group.position,
                waited=group.waited.ToTimedelta(),
                left=group.left.ToTimedelta(),
                reason=group.reason,
            )
            for group in message.queue
        ),
        tools=tuple(message.tools),
        not_forkable=message.not_forkable,
        parked_count=message.parked_count,
        resident_count=message.resident_count or message.capacity_count,
    )


def read_step(response: env_pb2.StepResponse, observation: Observation) -> StepResult:
    """Return a step's result from a host's message, with its decoded observation."""
    episode, results = response.episode, response.action_results
    return StepResult(
        observation=observation,
        action_errors=tuple(result.error for result in results),
        state=state_of(episode),
        end_reason=episode.end_reason,
        step_count=episode.step_count,
        timings_ms=dict(response.timings_ms),
        screen_change=_screen_change(response.screen_change) if response.HasField("screen_change") else None,
        replayed=response.replayed,
        guest_end_cause=episode.guest_end_cause,
        # A tool that failed has no output.
        tool_results=tuple(_tool_result(result) if result.HasField("output") else None for result in results),
        unrecorded_requests=tuple(map(read_unrecorded, response.unrecorded_requests)),
    )


def read_unrecorded(message: env_pb2.UnrecordedRequest) -> UnrecordedRequest:
    kind = env_pb2.UnrecordedRequest.Kind.Name(message.kind).removeprefix("KIND_").lower()
    return UnrecordedRequest(kind=kind, method=message.method, url=message.url)


def _screen_change(message: env_pb2.ScreenChange) -> ScreenChange:
    return ScreenChange(
        base_frame_id=message.base_frame_id,
        changed_fraction=message.changed_fraction,
        changed_regions=tuple(map(box, message.changed_regions)),
        grey_difference=message.grey_difference if message.HasField("grey_difference") else None,
    )


def _tool_result(message: env_pb2.ActionResult) -> ToolResult:
    return ToolResult(
        output=message.output,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        timed_out=message.timed_out,
        left_out_bytes=message.left_out_bytes,
    )
