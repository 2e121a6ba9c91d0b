"""Convert errors to gRPC statuses: code, reason, retry delay, invalid field. Pure.

The code determines the client's reaction, the reason is the cause:

| code | reason | client |
|---|---|---|
| INVALID_ARGUMENT | BAD_FIELD, REQUEST_ID_REUSED | fix the bug |
| NOT_FOUND | EPISODE_NOT_FOUND, TASK_NOT_FOUND, POOL_NOT_FOUND, IMAGE_NOT_FOUND, NOT_FOUND | reset, or fix the name |
| FAILED_PRECONDITION | EPISODE_ENDED, GROUP_TOO_LARGE, GUEST_REFUSED, NOT_FORKABLE | stop |
| ABORTED | STEP_INDEX_MISMATCH | abandon the episode |
| RESOURCE_EXHAUSTED | POOL_EXHAUSTED, TOKEN_QUOTA, RATE_LIMITED | wait and retry with the same request_id |
| UNAVAILABLE | DRAINING, POOL_FAILING, HYPERVISOR_UNAVAILABLE | another host, or wait and retry |
| UNAUTHENTICATED | UNAUTHENTICATED | send a valid token |
| PERMISSION_DENIED | ACCESS_DENIED, SCOPE_TOO_SMALL | ask the operator |
| UNIMPLEMENTED | UNIMPLEMENTED | do not use the feature |
| DATA_LOSS | MACHINE_LOST, GUEST_UNRESPONSIVE, GUEST_ERROR | void the sample |
| INTERNAL | SETUP_FAILED, EVALUATOR_FAILED, IMAGE_ERROR, CONFIG_ERROR, BUG | report; void it |
| INTERNAL | HYPERVISOR_ERROR, TEMPLATE_CORRUPT, STORE_ERROR, OSWORLD_ERROR | report; void it |

SETUP_FAILED is INTERNAL, not UNAVAILABLE: most setups fail the same way each time, so a client that retried forever
would waste machines. GUEST_UNRESPONSIVE is DATA_LOSS, not DEADLINE_EXCEEDED: the caller's own deadline may be far off,
and a retry would fail the same way.
"""

from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from envd.api.fields import duration_of
from envd.base import errors

DOMAIN: Final = "cuaenv"

#: The nearest class in an error's MRO decides.
CODES: Final[Mapping[type[errors.EnvdError], grpc.StatusCode]] = {
    errors.EnvdError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.EpisodeEnded: grpc.StatusCode.FAILED_PRECONDITION,
    errors.GroupTooLarge: grpc.StatusCode.FAILED_PRECONDITION,
    errors.GuestRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotForkable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StepIndexMismatch: grpc.StatusCode.ABORTED,
    errors.PoolExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PoolFailing: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.HypervisorUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.MachineLost: grpc.StatusCode.DATA_LOSS,
    errors.GuestUnresponsive: grpc.StatusCode.DATA_LOSS,
    errors.GuestError: grpc.StatusCode.DATA_LOSS,
}

# All details are sent in HTTP/2 headers, which peers limit to 8 KiB, and the message is sent twice: percent-encoded and
# in base64.
_MAX_MESSAGE_BYTES = 1024
_MAX_METADATA_CHARS = 128


def code_of(error: errors.EnvdError) -> grpc.StatusCode:
    """Return an error's gRPC code."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def reason_of(error: Exception) -> str:
    """Return an error's reason for clients and metrics; BUG for an unexpected exception."""
    return error.reason if isinstance(error, errors.EnvdError) else errors.EnvdError.reason


def status_of(error: Exception, *, metadata: Mapping[str, str]) -> status_pb2.Status:
    """Return the status of an error; `metadata` has the method and ids of the call.

    The text of an unexpected exception is not sent: it may contain secrets.
    """
    if isinstance(error, errors.EnvdError):
        code, message = code_of(error), _shortened(str(error))
    else:
        code, message = grpc.StatusCode.INTERNAL, f"a bug in envd ({type(error).__name__}); its log has the traceback"
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=reason_of(error),
            domain=DOMAIN,
            metadata={key: value[:_MAX_METADATA_CHARS] for key, value in metadata.items()},
        )
    ]
    if isinstance(error, errors.RetryableError):
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_of(error.retry_after_s)))
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_shortened(error.description)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    number, _ = code.value
    return status_pb2.Status(code=number, message=message, details=[_packed(detail) for detail in details])


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _shortened(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return data.decode()
    return data[: _MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
