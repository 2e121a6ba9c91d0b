"""Errors of calls: families by what a caller does about them, and classes of their own for what needs another reaction.
`cuaenv.client` shows the tree.

A class lists the reasons of `cuaenv.reasons` that it stands for. A reason that is newer than this client becomes the
class of its gRPC code, which says no more than the code does.
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
    "Conflict",
    "DeadlineExceeded",
    "Draining",
    "EnvError",
    "EpisodeEnded",
    "EpisodeNotFound",
    "EvaluatorFailed",
    "Exhausted",
    "GroupTooLarge",
    "GuestEnded",
    "GuestFailed",
    "GuestRefused",
    "HumanInControl",
    "LossUndecided",
    "MachineLost",
    "NotForkable",
    "NotFound",
    "NotSupported",
    "PoolExhausted",
    "RateLimited",
    "Refused",
    "SampleVoid",
    "SetupFailed",
    "TaskNotFound",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
]

_BY_REASON: dict[str, type["EnvError"]] = {}
_BY_CODE: dict[str, type["EnvError"]] = {}


class EnvError(Exception):
    """Base of all failures of a call. Can be pickled, so it can be passed between processes."""

    remedy = ""
    """What the caller can do, as the end of the error's text."""

    def __init_subclass__(cls, *, reasons: Collection[str] = (), codes: Collection[str] = ()) -> None:
        super().__init_subclass__()
        _BY_REASON.update(dict.fromkeys(reasons, cls))
        _BY_CODE.update(dict.fromkeys(codes, cls))

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


class BadRequest(EnvError, codes=["INVALID_ARGUMENT", "OUT_OF_RANGE"]):
    """A field is missing, malformed or out of range, or a message has more than 64 MiB; the episode is unharmed."""


class NotFound(EnvError, codes=["NOT_FOUND"]):
    """The named thing does not exist."""


class EpisodeNotFound(NotFound, reasons=["EPISODE_NOT_FOUND"]):
    """The episode was closed, or its lease expired."""


class TaskNotFound(NotFound, reasons=["TASK_NOT_FOUND"]):
    """The task does not exist."""


class CheckpointNotFound(NotFound, reasons=["CHECKPOINT_NOT_FOUND"]):
    """The checkpoint was deleted, has expired, or is on another host."""


class EpisodeEnded(EnvError, reasons=["EPISODE_ENDED"]):
    """The episode takes no more steps; it may still be evaluated."""


class GuestEnded(EpisodeEnded, reasons=["GUEST_ENDED"]):
    """The guest ended itself, by power-off, panic or a killed session; the episode is scored."""


class Refused(EnvError, codes=["FAILED_PRECONDITION", "ALREADY_EXISTS"]):
    """Not possible in the present state of the episode, the pool or the host; nothing was done."""


class GroupTooLarge(Refused, reasons=["GROUP_TOO_LARGE"]):
    """The pool can never hold a group of this size."""


class GuestRefused(Refused, reasons=["GUEST_REFUSED"]):
    """The guest rejected the request; the episode is unharmed."""


class NotForkable(Refused, reasons=["NOT_FORKABLE"]):
    """The episode's machine has state that cannot be copied; the episode continues."""


class CheckpointUnusable(Refused, reasons=["CHECKPOINT_UNUSABLE", "CHECKPOINT_CORRUPT"]):
    """The checkpoint is damaged, or the host has another template or version of the task than it needs."""


class CheckpointStoreFull(Refused, reasons=["CHECKPOINT_STORE_FULL"]):
    """No space for another checkpoint, and none that may be removed. The episode continues."""


class NotSupported(Refused, codes=["UNIMPLEMENTED"]):
    """The daemon's release or its settings do not have this call; `capabilities()` lists what the release has."""

    @classmethod
    def by_release(cls, what: str, *, host: str) -> "NotSupported":
        """Return the error for an addition of the contract that a host's release does not know."""
        return cls(f"{host}: its release does not know {what}; update envd there", code="UNIMPLEMENTED", host=host)


class Conflict(EnvError, codes=["ABORTED"]):
    """Someone else stepped the episode or rolled it back, so this call did nothing; abandon the episode."""


class HumanInControl(Conflict, reasons=["HUMAN_IN_CONTROL"]):
    """A person controls the episode in the console, or has acted since it was observed. This call had no effect."""

    remedy = "call handed_back(), then decide again"


class AccessDenied(EnvError, codes=["PERMISSION_DENIED"]):
    """The pool or the token's scope does not allow this call."""


class Unauthenticated(AccessDenied, codes=["UNAUTHENTICATED"]):
    """The daemon requires a token and got none, or an unknown one."""

    remedy = "pass token= or set ENVD_TOKEN"


class Exhausted(EnvError, codes=["RESOURCE_EXHAUSTED"]):
    """Too few machines, or too many calls, until the deadline; the call did nothing. Try again later."""


class PoolExhausted(Exhausted, reasons=["POOL_EXHAUSTED", "TOKEN_QUOTA"]):
    """No machine became free before the deadline, or the token holds as many as it may."""

    remedy = "raise timeout=, limit this client's episodes with max_episodes=, or close some"


class RateLimited(Exhausted, reasons=["RATE_LIMITED"]):
    """The token exceeded its call rate."""


# A killed server sends CANCELLED for the calls that it cuts off; a caller's own cancellation raises no error here.
class Unavailable(EnvError, codes=["CANCELLED", "UNAVAILABLE"]):
    """The daemon could not be reached, or its pool started no machines, until the deadline; use another host."""


class Unreachable(Unavailable):
    """The daemon has never been reached: it is not started, the target is wrong, or only one side uses TLS."""


class Draining(Unavailable, reasons=["DRAINING"]):
    """The daemon is stopping; use another host."""


class DeadlineExceeded(Unavailable, codes=["DEADLINE_EXCEEDED"]):
    """No response before the deadline. The call continues at the service; a reset or fork is ended there."""


class ClientClosed(EnvError):
    """The client, or the episode during a call, was closed here; or this process was forked from one with a client."""


class SampleVoid(EnvError, codes=["DATA_LOSS", "INTERNAL", "UNKNOWN"]):
    """A fault of the service, not the agent: never train on the episode."""


class MachineLost(SampleVoid, reasons=["MACHINE_LOST"]):
    """The host lost the episode's machine."""


class LossUndecided(SampleVoid, reasons=["LOSS_UNDECIDED"]):
    """The machine is lost and the agent may have caused it; do not repeat the episode."""


class GuestFailed(SampleVoid, reasons=["GUEST_UNRESPONSIVE", "GUEST_ERROR"]):
    """The episode's guest hangs, or failed an operation of the service."""


class SetupFailed(SampleVoid, reasons=["SETUP_FAILED"]):
    """The task's setup failed, so no episode was opened."""


class EvaluatorFailed(SampleVoid, reasons=["EVALUATOR_FAILED"]):
    """A checker failed and gave no score."""


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
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code.name, EnvError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason:
        kind = BadRequest  # gRPC's own limit of messages
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
