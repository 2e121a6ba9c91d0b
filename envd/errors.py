"""Every way in which envd itself can fail, one class for each thing a caller can do about it.

```text
EnvdError
├── InvalidRequest         a field is wrong; fix the caller
│   └── RequestIdReused    same request_id, another body
├── NotFound
│   ├── EpisodeNotFound    unknown, closed, or its lease lapsed
│   ├── TaskNotFound
│   ├── PoolNotFound
│   └── ImageNotFound
├── EpisodeEnded           the episode takes no more steps
├── GroupTooLarge          the pool, or the run's quota, can never hold that many
├── StepIndexMismatch      the caller's view of the episode is stale
├── PoolExhausted          wait and retry with the same request_id
├── PoolFailing            the pool's machines do not start; another pool or host, or retry later
├── Draining               the daemon is stopping; another host will do
├── AccessDenied           switched off for this pool
│   └── ScopeTooSmall      this token may not make such calls
├── Unauthenticated        no token, or one that is not known
├── RateLimited            too many calls; wait and retry
├── Unimplemented          in the contract, not in this release
├── MachineLost            the machine died; the episode is void
├── GuestUnresponsive      the guest did not answer in time
├── GuestError             the guest answered that it cannot
│   └── GuestRefused       ... and the episode is unharmed
├── SetupFailed            a task's setup did not complete
├── EvaluatorFailed        a checker broke; there is no score
├── NotForkable            the machine has something that a fork cannot have too
├── HypervisorError        libvirt or QEMU refused
│   ├── HypervisorUnavailable  libvirt cannot be reached now; wait and retry
│   └── TemplateCorrupt    a stored template is not what was stored; it is never used
├── StoreError             the daemon's database cannot be used; nothing was done
├── ImageError             an image cannot be built, imported or read
└── ConfigError            the configuration is wrong; nothing was started
```

What the *agent* does wrong is never here: it is data in the response (`ActionOutcome.error`).
Messages name the thing, its state and the way out.
"""

from typing import ClassVar


class EnvdError(Exception):
    """Base of all envd failures."""

    #: UPPER_SNAKE cause, stable across releases; sent as `ErrorInfo.reason` and used as a metric label.
    reason: ClassVar[str] = "BUG"


class InvalidRequest(EnvdError):
    """A request field is missing, malformed or out of range."""

    reason = "BAD_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class RequestIdReused(InvalidRequest):
    """The same `request_id` came with another body."""

    reason = "REQUEST_ID_REUSED"

    def __init__(self, request_id: str) -> None:
        super().__init__("request_id", f"{request_id} was already used with another body; make a new one per request")


class NotFound(EnvdError):
    """The named thing does not exist."""

    reason = "NOT_FOUND"


class EpisodeNotFound(NotFound):
    """No such episode: never opened, closed, or its lease lapsed."""

    reason = "EPISODE_NOT_FOUND"


class TaskNotFound(NotFound):
    """No such task in the loaded suites."""

    reason = "TASK_NOT_FOUND"


class PoolNotFound(NotFound):
    """No such pool on this daemon."""

    reason = "POOL_NOT_FOUND"


class ImageNotFound(NotFound):
    """No such image in the catalogue."""

    reason = "IMAGE_NOT_FOUND"


class EpisodeEnded(EnvdError):
    """The episode is over and takes no more steps."""

    reason = "EPISODE_ENDED"


class GroupTooLarge(EnvdError):
    """The pool, or its run's quota, can never hold a group of this size."""

    reason = "GROUP_TOO_LARGE"


class StepIndexMismatch(EnvdError):
    """`step_index` is not the episode's next one."""

    reason = "STEP_INDEX_MISMATCH"


class PoolExhausted(EnvdError):
    """No machine came free in time. Retry after `retry_after_s` with the same `request_id`."""

    reason = "POOL_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TokenQuotaReached(PoolExhausted):
    """The caller's token holds as many machines as it may."""

    reason = "TOKEN_QUOTA"


class PoolFailing(EnvdError):
    """The pool's machines failed to start too often in a row. The next one tries in `retry_after_s`."""

    reason = "POOL_FAILING"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(EnvdError):
    """The daemon is stopping and admits nothing new."""

    reason = "DRAINING"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AccessDenied(EnvdError):
    """The pool does not allow this call."""

    reason = "ACCESS_DENIED"


class ScopeTooSmall(AccessDenied):
    """The caller's token may not make such calls; another one may."""

    reason = "SCOPE_TOO_SMALL"


class Unauthenticated(EnvdError):
    """The call came without a token, or with one that is not known."""

    reason = "UNAUTHENTICATED"


class RateLimited(EnvdError):
    """The caller makes more calls than it may; this one did nothing. Retry after `retry_after_s`."""

    reason = "RATE_LIMITED"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unimplemented(EnvdError):
    """Part of the contract that this release does not serve."""

    reason = "UNIMPLEMENTED"


class MachineLost(EnvdError):
    """The machine is gone: QEMU exited or was destroyed. The episode is void, never a reward."""

    reason = "MACHINE_LOST"


class GuestUnresponsive(EnvdError):
    """The guest did not answer within its deadline."""

    reason = "GUEST_UNRESPONSIVE"


class GuestError(EnvdError):
    """The guest answered that it cannot do what was asked."""

    reason = "GUEST_ERROR"


class GuestRefused(GuestError):
    """The guest cannot do what a client asked of it beside the episode, such as to read a file; nothing is harmed."""

    reason = "GUEST_REFUSED"


class SetupFailed(EnvdError):
    """A task's setup did not complete, so no episode was opened."""

    reason = "SETUP_FAILED"


class EvaluatorFailed(EnvdError):
    """A checker broke, so there is no score; never to be read as 0."""

    reason = "EVALUATOR_FAILED"


class HypervisorError(EnvdError):
    """libvirt or QEMU refused."""

    reason = "HYPERVISOR_ERROR"


class HypervisorUnavailable(HypervisorError):
    """A libvirtd does not answer: what needs one was not done, or ended half way and was undone."""

    reason = "HYPERVISOR_UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TemplateCorrupt(HypervisorError):
    """A template is not what was stored, or not there any more: it is never used."""

    reason = "TEMPLATE_CORRUPT"


class NotForkable(EnvdError):
    """The machine cannot be branched where it stands; the message names what stands in the way. It goes on."""

    reason = "NOT_FORKABLE"


class StoreError(EnvdError):
    """The daemon's own database cannot be read or written, so what was asked for was not begun."""

    reason = "STORE_ERROR"


class ImageError(EnvdError):
    """An image cannot be built, imported or read."""

    reason = "IMAGE_ERROR"


class ConfigError(EnvdError):
    """The configuration is wrong; nothing was started."""

    reason = "CONFIG_ERROR"


class OsworldError(EnvdError):
    """OSWorld's package or task files cannot be had, or its worker does not start."""

    reason = "OSWORLD_ERROR"
