"""Commands and results of the episode service. Plain data; `envd.api.convert_*` maps it to and from the wire."""

import math
from dataclasses import dataclass, field

from cuaenv.actions import Action
from cuaenv.results import UnrecordedRequest
from envd.base.config import SettlePolicy
from envd.desktop.observation import ActionOutcome, Observation, ObservationOptions
from envd.episodes.progress import NO_CHECKPOINTS, AutomaticCheckpoints, EpisodeStatus
from envd.tasks.perturbations import PerturbationDraw
from envd.tasks.text import ScoreResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetCommand:
    """Open a group of episodes; or a machine on which a checkpoint is scored."""

    request_id: str
    task_id: str
    """Empty for that of the checkpoint."""
    checkpoint_id: str = ""
    """The checkpoint to begin in; empty for the start of the task."""
    sees_all_owners: bool = True
    """Whether it may begin in other owners' checkpoints."""
    pool: str = ""
    """Empty for the task's own pool, or the only one that fits."""
    group_size: int = 1
    lease_ttl_s: float | None = None
    max_steps: int | None = None
    run: str = ""
    """Label of the training run, for fair sharing and metrics."""
    owner: str = ""
    """Name of the caller's token; empty if the daemon uses no tokens."""
    max_machines: int | None = None
    """Maximum machines that the owner may hold; None for no limit."""
    settle: SettlePolicy | None = None
    observe: ObservationOptions = field(default_factory=ObservationOptions)
    perturb: PerturbationDraw | None = None
    timeout_s: float = 600.0
    """Limit for admission and setup."""
    admission_timeout_s: float = math.inf
    """Limit for admission alone."""
    automatic: AutomaticCheckpoints = NO_CHECKPOINTS
    """When the episodes store checkpoints by themselves."""
    fingerprint: bytes = b""
    """Digest of the whole request: same request_id, same fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGroup:
    """A group of new episodes and their first observations (parallel tuples)."""

    episodes: tuple[EpisodeStatus, ...]
    observations: tuple[Observation, ...]
    timings_ms: dict[str, float]
    instruction: str = ""
    """The task's instruction; empty for a fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCommand:
    """Fork an active episode in its present state."""

    request_id: str
    episode_id: str
    step_index: int
    """The episode's step count, at which to fork."""
    fork_count: int = 1
    lease_ttl_s: float | None = None
    max_machines: int | None = None
    """Maximum machines that the parent's owner may hold; None for no limit."""
    observe: ObservationOptions = field(default_factory=ObservationOptions)
    timeout_s: float = 600.0
    """Limit for admission."""
    epoch: int = 0
    """The parent's; 0 for any."""
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommand:
    """Store the present state of an active episode."""

    request_id: str
    episode_id: str
    step_index: int
    """The episode's step count, at which to store it."""
    label: str = ""
    ttl_s: float | None = None
    """How long it is kept; None for the daemon's default."""
    pinned: bool = False
    """Whether it is never removed to make space for others."""
    epoch: int = 0
    """The episode's; 0 for any."""
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackCommand:
    """Put an episode back into the state of a checkpoint."""

    request_id: str
    episode_id: str
    checkpoint_id: str
    control_id: str = ""
    """Identifies the control of the person who asks; empty for the agent."""
    epoch: int = 0
    """The episode's; 0 for any."""
    observe: ObservationOptions = field(default_factory=ObservationOptions)
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackResult:
    """An episode after its rollback, and what its agent sees."""

    episode: EpisodeStatus
    observation: Observation
    timings_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommand:
    """Perform actions in one episode, then observe."""

    request_id: str
    episode_id: str
    step_index: int
    actions: tuple[Action, ...]
    settle: SettlePolicy | None = None
    observe: ObservationOptions = field(default_factory=ObservationOptions)
    epoch: int = 0
    """The episode's; 0 for any."""
    expects_idle: bool = False
    """Whether no call follows soon."""
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The effect of a step and the agent's new observation."""

    episode: EpisodeStatus
    observation: Observation
    outcomes: tuple[ActionOutcome, ...]
    """One per performed action; actions after `Done` or `Fail` are not performed."""
    timings_ms: dict[str, float]
    replayed: bool = False
    """Whether this is the recorded response to an earlier call with the same request_id."""
    unrecorded: tuple[UnrecordedRequest, ...] = ()
    """What its guest asked for since the step before, and its web recording does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateResult(ScoreResult):
    """An episode's score."""

    episode: EpisodeStatus
