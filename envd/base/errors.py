"""Every way in which envd itself can fail: one class for each reaction of a caller.

```text
EnvdError
├── InvalidRequest              a field is wrong; fix the caller
│   └── RequestIdReused         same request_id, different body
├── NotFound
│   ├── EpisodeNotFound         never opened here, closed, or its lease expired
│   ├── TaskNotFound
│   ├── PoolNotFound
│   └── ImageNotFound
├── EpisodeEnded                the episode accepts no more steps
├── GroupTooLarge               the group can never fit the pool or a quota
├── StepIndexMismatch           the caller's view of the episode is stale
├── RetryableError              retry after `retry_after_s`
│   ├── PoolExhausted           no machine became free; retry with the same request_id
│   │   └── TokenQuotaReached   the token already holds its maximum of machines
│   ├── PoolFailing             the pool's machines do not start; use another pool or host, or retry
│   ├── Draining                the daemon is stopping; use another host
│   └── RateLimited             too many calls; wait and retry
├── AccessDenied                disabled for this pool
│   └── ScopeTooSmall           the token's scope does not cover the call
├── Unauthenticated             no token, or an unknown one
├── Unimplemented               in the contract, but not in this release
├── MachineLost                 the machine died; the episode is void
├── GuestUnresponsive           the guest did not answer in time
├── GuestError                  the guest reported a failure
│   └── GuestRefused            ... and the episode is unharmed
├── SetupFailed                 a task's setup did not complete
├── EvaluatorFailed             a checker failed and gave no score
├── NotForkable                 the machine has a device or state that a fork cannot copy
├── HypervisorError             libvirt or QEMU refused
│   ├── HypervisorUnavailable   libvirt is unreachable; wait and retry (also a RetryableError)
│   └── TemplateCorrupt         a stored template is damaged; it is never used
├── StoreError                  the daemon's database is unusable; nothing was done
├── ImageError                  an image cannot be built, imported or read
├── ConfigError                 the configuration is wrong; nothing was started
└── OsworldError                OSWorld's package, task files or worker are unavailable
```

The *agent's* mistakes are never errors here: they are data in the response (`ActionOutcome.error`).
Messages have the form `<thing> <id>: <problem>; <remedy>`.

How to add an error: define a class with its own `reason` below its nearest relative, and draw it in the tree above.
If its parent's gRPC code does not fit, map it in `envd.api.status.CODES`. Add its reason to the table in
`envd.api.status`, and to `ErrorInfo` in env.proto. Tests compare the tree and the table with the classes.
"""

from typing import ClassVar


class EnvdError(Exception):
    """Base of all envd failures."""

    #: UPPER_SNAKE cause, stable across releases; sent as `ErrorInfo.reason` and used as a metric label.
    reason: ClassVar[str] = "BUG"


class RetryableError(EnvdError):
    """Base of failures that may pass: nothing was done, and a retry makes sense after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidRequest(EnvdError):
    """A request field is missing, malformed or out of range."""

    reason = "BAD_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class RequestIdReused(InvalidRequest):
    """The same `request_id` came with a different body."""

    reason = "REQUEST_ID_REUSED"

    def __init__(self, request_id: str) -> None:
        super().__init__("request_id", f"{request_id} was already used with another body; make a new one per request")


class NotFound(EnvdError):
    """The named object does not exist."""

    reason = "NOT_FOUND"


class EpisodeNotFound(NotFound):
    """The episode was never opened here, was closed, or its lease expired."""

    reason = "EPISODE_NOT_FOUND"


class TaskNotFound(NotFound):
    """The loaded suites have no such task."""

    reason = "TASK_NOT_FOUND"


class PoolNotFound(NotFound):
    """This daemon has no such pool."""

    reason = "POOL_NOT_FOUND"


class ImageNotFound(NotFound):
    """The catalogue has no such image."""

    reason = "IMAGE_NOT_FOUND"


class EpisodeEnded(EnvdError):
    """The episode has ended and accepts no more steps."""

    reason = "EPISODE_ENDED"


class GroupTooLarge(EnvdError):
    """A group of this size can never fit the pool, the run's quota or the token's quota."""

    reason = "GROUP_TOO_LARGE"


class StepIndexMismatch(EnvdError):
    """`step_index` is not the index of the episode's next step."""

    reason = "STEP_INDEX_MISMATCH"


class PoolExhausted(RetryableError):
    """No machine became free in time. Retry after `retry_after_s` with the same `request_id`."""

    reason = "POOL_EXHAUSTED"


class TokenQuotaReached(PoolExhausted):
    """The caller's token already holds its maximum of machines."""

    reason = "TOKEN_QUOTA"


class PoolFailing(RetryableError):
    """The pool's machines failed to start too often in a row. The pool tries again in `retry_after_s`."""

    reason = "POOL_FAILING"


class Draining(RetryableError):
    """The daemon is stopping and admits nothing new."""

    reason = "DRAINING"


class RateLimited(RetryableError):
    """The caller exceeds its call rate; this call did nothing."""

    reason = "RATE_LIMITED"


class AccessDenied(EnvdError):
    """The pool does not allow this call."""

    reason = "ACCESS_DENIED"


class ScopeTooSmall(AccessDenied):
    """The scope of the caller's token does not cover this call."""

    reason = "SCOPE_TOO_SMALL"


class Unauthenticated(EnvdError):
    """The call has no token, or an unknown one."""

    reason = "UNAUTHENTICATED"


class Unimplemented(EnvdError):
    """Part of the contract that this release does not support."""

    reason = "UNIMPLEMENTED"


class MachineLost(EnvdError):
    """The machine is gone: QEMU exited or was destroyed. The episode is void, never a reward."""

    reason = "MACHINE_LOST"


class GuestUnresponsive(EnvdError):
    """The guest did not answer within its deadline."""

    reason = "GUEST_UNRESPONSIVE"


class GuestError(EnvdError):
    """The guest reported that it cannot do what was requested."""

    reason = "GUEST_ERROR"


class GuestRefused(GuestError):
    """The guest cannot serve a call outside the episode's steps, such as reading a file; the episode is unharmed."""

    reason = "GUEST_REFUSED"


class SetupFailed(EnvdError):
    """A task's setup did not complete, so no episode was opened."""

    reason = "SETUP_FAILED"


class EvaluatorFailed(EnvdError):
    """A checker failed and gave no score; never read it as 0."""

    reason = "EVALUATOR_FAILED"


class HypervisorError(EnvdError):
    """libvirt or QEMU refused."""

    reason = "HYPERVISOR_ERROR"


class HypervisorUnavailable(HypervisorError, RetryableError):
    """libvirtd does not answer: the operation was not started, or was undone."""

    reason = "HYPERVISOR_UNAVAILABLE"


class TemplateCorrupt(HypervisorError):
    """A stored template is damaged or missing; it is never used."""

    reason = "TEMPLATE_CORRUPT"


class NotForkable(EnvdError):
    """The machine cannot be forked in its present state; the message names the cause. The episode continues."""

    reason = "NOT_FORKABLE"


class StoreError(EnvdError):
    """The daemon's own database cannot be read or written, so the operation was not started."""

    reason = "STORE_ERROR"


class ImageError(EnvdError):
    """An image cannot be built, imported or read."""

    reason = "IMAGE_ERROR"


class ConfigError(EnvdError):
    """The configuration is wrong; nothing was started."""

    reason = "CONFIG_ERROR"


def cannot_bind(setting: str, address: str, reason: str) -> ConfigError:
    """Return the error of a setting whose address cannot be listened on."""
    return ConfigError(f"{setting} {address}: cannot be bound: {reason}; free it, or set {setting} to another")


class OsworldError(EnvdError):
    """OSWorld's package or task files are unavailable, or its worker does not start."""

    reason = "OSWORLD_ERROR"
