"""Every way in which envd itself can fail: one class for each reaction of a caller.

The *agent's* mistakes are never errors here: they are data in the response (`ActionOutcome.error`).
Messages have the form `<thing> <id>: <problem>; <remedy>`. `cuaenv.reasons` has each reason's gRPC code.
"""

from typing import ClassVar


class EnvdError(Exception):
    """Base of all envd failures."""

    #: UPPER_SNAKE cause, stable across releases; sent as `ErrorInfo.reason` and used as a metric label.
    reason: ClassVar[str] = "BUG"

    def __init_subclass__(cls, *, reason: str | None = None) -> None:
        super().__init_subclass__()
        cls.reason = reason or cls.reason


class RetryableError(EnvdError):
    """Base of failures that may pass: nothing was done, and a retry makes sense after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidRequest(EnvdError, reason="BAD_FIELD"):
    """A request field is missing, malformed or out of range."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class RequestIdReused(InvalidRequest, reason="REQUEST_ID_REUSED"):
    """The same `request_id` came with a different body."""

    def __init__(self, request_id: str) -> None:
        super().__init__("request_id", f"{request_id} was already used with another body; make a new one per request")


class ObjectNotFound(EnvdError, reason="NOT_FOUND"):
    """The named object does not exist."""


class EpisodeNotFound(ObjectNotFound, reason="EPISODE_NOT_FOUND"):
    """The episode was never opened here, was closed, or its lease expired."""


def unknown_episode(episode_id: str) -> EpisodeNotFound:
    return EpisodeNotFound(
        f"episode {episode_id}: not found (never opened on this daemon, or closed long ago); reset a new one"
    )


class TaskNotFound(ObjectNotFound, reason="TASK_NOT_FOUND"):
    """The loaded suites have no such task."""


class PoolNotFound(ObjectNotFound, reason="POOL_NOT_FOUND"):
    """This daemon has no such pool."""


class ImageNotFound(ObjectNotFound, reason="IMAGE_NOT_FOUND"):
    """The catalogue has no such image."""


class CheckpointNotFound(ObjectNotFound, reason="CHECKPOINT_NOT_FOUND"):
    """The checkpoint was never created on this host, was deleted, or has expired."""


class CheckpointUnusable(EnvdError, reason="CHECKPOINT_UNUSABLE"):
    """This daemon has another template, task version or set of pools than the checkpoint needs."""


class CheckpointStoreFull(EnvdError, reason="CHECKPOINT_STORE_FULL"):
    """The disk or a quota has no space for another checkpoint, and none can be removed."""


class EpisodeEnded(EnvdError, reason="EPISODE_ENDED"):
    """The episode has ended and accepts no more steps."""


class GuestEnded(EpisodeEnded, reason="GUEST_ENDED"):
    """The guest ended itself: power-off, reboot, panic, a killed session. The episode is scored.

    `cause` is UPPER_SNAKE: POWER_OFF, REBOOT, PANIC, SESSION_ENDED, DISK_FULL, UNRESPONSIVE, UNCHECKABLE.
    """

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class GroupTooLarge(EnvdError, reason="GROUP_TOO_LARGE"):
    """A group of this size can never fit the pool, the run's quota or the token's quota."""


class StepIndexMismatch(EnvdError, reason="STEP_INDEX_MISMATCH"):
    """`step_index` is not the index of the episode's next step."""


class StaleEpoch(EnvdError, reason="STALE_EPOCH"):
    """The episode was rolled back, so the call is one of an earlier epoch; it did nothing to the present one."""


class PoolExhausted(RetryableError, reason="POOL_EXHAUSTED"):
    """No machine became free in time. Retry after `retry_after_s` with the same `request_id`."""


class TokenQuotaReached(PoolExhausted, reason="TOKEN_QUOTA"):
    """The caller's token already holds its maximum of machines."""


class PoolFailing(RetryableError, reason="POOL_FAILING"):
    """The pool's machines failed to start too often in a row, or the host's disk is full. Retry in `retry_after_s`."""


class Draining(RetryableError, reason="DRAINING"):
    """The daemon is stopping and admits nothing new."""


class HumanInControl(RetryableError, reason="HUMAN_IN_CONTROL"):
    """A person controls the episode, or has acted since the caller observed it. Observe, then decide again."""


class RateLimited(RetryableError, reason="RATE_LIMITED"):
    """The caller exceeds its call rate; this call did nothing."""


class AccessDenied(EnvdError, reason="ACCESS_DENIED"):
    """The pool does not allow this call."""


class ScopeTooSmall(AccessDenied, reason="SCOPE_TOO_SMALL"):
    """The scope of the caller's token does not cover this call."""


class Unauthenticated(EnvdError, reason="UNAUTHENTICATED"):
    """The call has no token, or an unknown one."""


class Unimplemented(EnvdError, reason="UNIMPLEMENTED"):
    """Part of the contract that this release does not support."""


class MachineLost(EnvdError, reason="MACHINE_LOST"):
    """The host lost the machine: QEMU was killed or destroyed. The episode is void, never a reward."""


class LossUndecided(MachineLost, reason="LOSS_UNDECIDED"):
    """The machine is lost, and neither the host nor the guest is known to be the cause. The episode is void."""


class GuestUnresponsive(EnvdError, reason="GUEST_UNRESPONSIVE"):
    """The guest did not answer within its deadline."""


class GuestServiceEnded(GuestUnresponsive, reason="GUEST_UNRESPONSIVE"):
    """The guest's service ended during a request, and was started again."""


class GuestError(EnvdError, reason="GUEST_ERROR"):
    """The guest reported that it cannot do what was requested."""


class TooLarge(GuestError, reason="GUEST_ERROR"):
    """What the guest shows is larger than a limit: a fact about it, which a checker scores 0."""


class DisplayError(GuestError, reason="GUEST_ERROR"):
    """The machine's display, which is QEMU's, broke its protocol."""


class GuestRefused(GuestError, reason="GUEST_REFUSED"):
    """The guest cannot serve a call outside the episode's steps, such as reading a file; the episode is unharmed."""


class SetupFailed(EnvdError, reason="SETUP_FAILED"):
    """A task's setup did not complete, so no episode was opened."""


class UserUnavailable(EnvdError, reason="USER_UNAVAILABLE"):
    """A task's user answers no question, whatever is asked; the episode is void."""


class EvaluatorFailed(EnvdError, reason="EVALUATOR_FAILED"):
    """A checker failed and gave no score; never read it as 0."""


class HypervisorError(EnvdError, reason="HYPERVISOR_ERROR"):
    """libvirt or QEMU refused."""


class HypervisorUnavailable(HypervisorError, RetryableError, reason="HYPERVISOR_UNAVAILABLE"):
    """libvirtd does not answer: the operation was not started, or was undone."""


class TemplateCorrupt(HypervisorError, reason="TEMPLATE_CORRUPT"):
    """A stored template is damaged or missing; it is never used."""


class CheckpointCorrupt(HypervisorError, reason="CHECKPOINT_CORRUPT"):
    """A file of a checkpoint is missing or damaged; it is never used."""


class NotForkable(EnvdError, reason="NOT_FORKABLE"):
    """The machine cannot be forked in its present state; the message names the cause. The episode continues."""


class StoreError(EnvdError, reason="STORE_ERROR"):
    """The daemon's own database cannot be read or written, so the operation was not started."""


class ImageError(EnvdError, reason="IMAGE_ERROR"):
    """An image cannot be built, imported or read."""


class ConfigError(EnvdError, reason="CONFIG_ERROR"):
    """The configuration is wrong; nothing was started."""


def cannot_bind(setting: str, address: str, reason: str) -> ConfigError:
    stop = "stop what listens there, such as another envd, or " if "in use" in reason else ""
    return ConfigError(f"{setting} {address}: cannot be bound: {reason}; {stop}set {setting} to another")


class OsworldError(EnvdError, reason="OSWORLD_ERROR"):
    """OSWorld's package or task files are unavailable, or its worker does not start."""
