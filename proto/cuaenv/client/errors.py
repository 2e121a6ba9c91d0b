"""Errors of calls, one class for each thing that a caller can do about them. `cuaenv.client` shows the tree.

A class lists the causes that it stands for: reasons of `cuaenv.reasons`, and gRPC codes for reasons newer than this
client and for failures of gRPC itself, which have none.
"""

import re
from collections.abc import Collection, Mapping
from datetime import timedelta

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

__all__ = [
    "AccessDenied",
    "BadRequest",
    "CheckpointNotFound",
    "CheckpointStoreFull",
    "CheckpointUnusable",
    "ClientClosed",
    "DeadlineExceeded",
    "Draining",
    "EnvError",
    "EpisodeEnded",
    "EpisodeNotFound",
    "EvaluatorFailed",
    "GroupTooLarge",
    "GuestEnded",
    "GuestFailed",
    "GuestRefused",
    "GuestUnresponsive",
    "HumanInControl",
    "LossUndecided",
    "MachineLost",
    "MessageTooLarge",
    "NotForkable",
    "NotFound",
    "NotSupported",
    "PoolExhausted",
    "PoolFailing",
    "PoolNotFound",
    "RateLimited",
    "SampleVoid",
    "ScopeTooSmall",
    "ServiceFault",
    "SetupFailed",
    "StaleEpoch",
    "StepIndexMismatch",
    "TaskNotFound",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
    "UserUnavailable",
]

_BY_CAUSE: dict[str, type["EnvError"]] = {}


class EnvError(Exception):
    """Base of all failures of a call. Can be pickled, so it can be passed between processes."""

    remedy = ""
    """What the caller can do, as the end of the error's text."""

    def __init_subclass__(cls, *, causes: Collection[str] = ()) -> None:
        super().__init_subclass__()
        _BY_CAUSE.update(dict.fromkeys(causes, cls))

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: timedelta | None = None,
        field: str = "",
        host: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        """Name of the gRPC status code."""
        self.reason = reason
        """Stable UPPER_SNAKE cause; empty if the failure did not come from the service itself."""
        self.metadata = dict(metadata or {})
        """Details such as `episode_id`."""
        self.retry_after = retry_after
        """Shortest wait before a retry, as the service suggests; None if a retry cannot help."""
        self.field = field
        """Invalid field of the request, for `BadRequest`."""
        self.host = host
        """The daemon that failed or could not be reached; empty if it was not a single one."""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.args[0], self.remedy)))


class BadRequest(EnvError, causes=["INVALID_ARGUMENT"]):
    """A request's field is missing, malformed or out of range; the episode is unharmed."""


class NotFound(EnvError, causes=["NOT_FOUND"]):
    """The named thing does not exist."""


class EpisodeNotFound(NotFound, causes=["EPISODE_NOT_FOUND"]):
    """The episode was closed, or its lease expired."""


class TaskNotFound(NotFound, causes=["TASK_NOT_FOUND"]):
    """The task does not exist."""


class PoolNotFound(NotFound, causes=["POOL_NOT_FOUND"]):
    """The pool does not exist."""


class CheckpointNotFound(NotFound, causes=["CHECKPOINT_NOT_FOUND"]):
    """The checkpoint was deleted, has expired, or is on another host."""


class CheckpointUnusable(EnvError, causes=["CHECKPOINT_UNUSABLE", "CHECKPOINT_CORRUPT"]):
    """The checkpoint is damaged, or the host has another template or version of the task than it needs."""


class CheckpointStoreFull(EnvError, causes=["CHECKPOINT_STORE_FULL"]):
    """No space for another checkpoint, and none that may be removed. The episode continues."""


class EpisodeEnded(EnvError, causes=["EPISODE_ENDED"]):
    """The episode takes no more steps; it may still be evaluated."""


class GuestEnded(EpisodeEnded, causes=["GUEST_ENDED"]):
    """The guest ended itself, by power-off, panic or a killed session; the episode is scored."""


class GroupTooLarge(EnvError, causes=["GROUP_TOO_LARGE"]):
    """The pool can never hold a group of this size."""


class GuestRefused(EnvError, causes=["GUEST_REFUSED"]):
    """The guest rejected the request; the episode is unharmed."""


class NotForkable(EnvError, causes=["NOT_FORKABLE"]):
    """The episode's machine has state that cannot be copied; the episode continues."""


class StepIndexMismatch(EnvError, causes=["STEP_INDEX_MISMATCH"]):
    """The episode is at another step than this client assumes; abandon it."""


class StaleEpoch(EnvError, causes=["STALE_EPOCH"]):
    """The episode was rolled back by someone else; the call did nothing to its present state."""


class Unauthenticated(EnvError, causes=["UNAUTHENTICATED"]):
    """The daemon requires a token and got none, or an unknown one."""

    remedy = "pass token= or set ENVD_TOKEN"


class AccessDenied(EnvError, causes=["PERMISSION_DENIED"]):
    """The pool does not allow this call."""


class ScopeTooSmall(AccessDenied, causes=["SCOPE_TOO_SMALL"]):
    """The token's scope does not cover this call."""


class NotSupported(EnvError, causes=["UNIMPLEMENTED"]):
    """The daemon's release or its settings do not have this call; `capabilities()` lists what the release has."""

    @classmethod
    def by_release(cls, what: str, *, host: str) -> "NotSupported":
        """Return the error for an addition of the contract that a host's release does not know."""
        return cls(f"{host}: its release does not know {what}; update envd there", code="UNIMPLEMENTED", host=host)


class MessageTooLarge(EnvError):
    """A message of more than 64 MiB."""


class PoolExhausted(EnvError, causes=["POOL_EXHAUSTED", "TOKEN_QUOTA"]):
    """No machine became free before the deadline, or the token holds as many as it may."""

    remedy = "raise timeout=, limit this client's episodes with max_episodes=, or close some"


class HumanInControl(EnvError, causes=["HUMAN_IN_CONTROL"]):
    """A person controls the episode in the console, or has acted since it was observed. This call had no effect."""

    remedy = "call handed_back(), then decide again"


class RateLimited(EnvError, causes=["RATE_LIMITED"]):
    """The token exceeded its call rate. This call had no effect."""


# A killed server sends CANCELLED for the calls that it cuts off; a caller's own cancellation raises no error here.
class Unavailable(EnvError, causes=["CANCELLED", "UNAVAILABLE"]):
    """The daemon could not be reached before the deadline."""


class Unreachable(Unavailable):
    """The daemon has never been reached: it is not started, the target is wrong, or only one side uses TLS."""


class Draining(Unavailable, causes=["DRAINING"]):
    """The daemon is stopping; use another host."""


class PoolFailing(Unavailable, causes=["POOL_FAILING"]):
    """The pool's machines failed to start until the deadline, or its host's disk is full; use another pool or host."""


class ClientClosed(EnvError):
    """The client, or the episode during a call, was closed here; or this process was forked from one with a client."""


class DeadlineExceeded(EnvError, causes=["DEADLINE_EXCEEDED"]):
    """No response before the deadline. The call continues at the service; a reset or fork is ended there."""


class SampleVoid(EnvError, causes=["DATA_LOSS"]):
    """A fault of the service, not the agent: never train on the episode."""


class MachineLost(SampleVoid, causes=["MACHINE_LOST"]):
    """The host lost the episode's machine."""


class LossUndecided(SampleVoid, causes=["LOSS_UNDECIDED"]):
    """The machine is lost and the agent may have caused it; do not repeat the episode."""


class GuestUnresponsive(SampleVoid, causes=["GUEST_UNRESPONSIVE"]):
    """The episode's guest hangs."""


class GuestFailed(SampleVoid, causes=["GUEST_ERROR"]):
    """The episode's guest failed an operation of the service."""


class UserUnavailable(SampleVoid, causes=["USER_UNAVAILABLE"]):
    """The user whom the agent asked could not answer."""


class SetupFailed(SampleVoid, causes=["SETUP_FAILED"]):
    """The task's setup failed, so no episode was opened."""


class EvaluatorFailed(SampleVoid, causes=["EVALUATOR_FAILED"]):
    """A checker failed and gave no score."""


class ServiceFault(SampleVoid, causes=["INTERNAL", "UNKNOWN"]):
    """Any other fault of the service."""


_GRPC_PREFIX = re.compile(r"failed to connect to all addresses; last error: [A-Z_]+: (\S+: )?")


def error_of(failure: grpc.aio.AioRpcError, *, host: str) -> EnvError:
    """Return the typed error of a call that failed at a host."""
    code, reason, invalid_field = failure.code(), "", ""
    metadata: dict[str, str] = {}
    retry_after: timedelta | None = None
    status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta()
        elif detail.Unpack(bad) and bad.field_violations:
            invalid_field = bad.field_violations[0].field
    if code is grpc.StatusCode.UNIMPLEMENTED and not reason:
        return NotSupported.by_release("this call", host=host)
    kind = _BY_CAUSE.get(reason) or _BY_CAUSE.get(code.name, EnvError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason:
        kind = MessageTooLarge  # gRPC's own limit
    return kind(
        # Its remedy is for callers of the contract; this client retries by itself.
        _GRPC_PREFIX.sub("", failure.details() or code.name).removesuffix("; retry with the same request_id"),
        code=code.name,
        reason=reason,
        metadata=metadata,
        retry_after=retry_after,
        field=invalid_field,
        host=host,
    )
