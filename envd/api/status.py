"""Convert errors to gRPC statuses: code, reason, retry delay, invalid field. Pure."""

from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from cuaenv.reasons import CODE_BY_REASON
from envd.base import errors

DOMAIN: Final = "cuaenv"

# All details are sent in HTTP/2 headers, which peers limit to 8 KiB, and the message is sent twice: percent-encoded and
# in base64.
_MAX_MESSAGE_BYTES = 1024
_MAX_METADATA_CHARS = 128
_OURS: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})


def code_of(error: errors.EnvdError) -> grpc.StatusCode:
    """Return an error's gRPC code."""
    return grpc.StatusCode[CODE_BY_REASON.get(error.reason, "INTERNAL")]


def reason_of(error: Exception) -> str:
    """Return an error's reason for clients and metrics; BUG for an unexpected exception."""
    return error.reason if isinstance(error, errors.EnvdError) else errors.EnvdError.reason


def is_failure_of_ours(error: Exception) -> bool:
    """Return whether an error is a failure of envd or its host, which its operator must investigate."""
    return not isinstance(error, errors.EnvdError) or code_of(error) in _OURS


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
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMicroseconds(round(error.retry_after_s * 1e6))
        details.append(retry)
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
