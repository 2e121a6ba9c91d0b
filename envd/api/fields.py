"""Validate single fields of a request; errors name the field. Pure."""

import re

from google.protobuf.duration_pb2 import Duration

from envd.base.errors import InvalidRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def required(value: str, field: str, *, max_chars: int = 256) -> str:
    """Return a required text. Raises: InvalidRequest."""
    if not value:
        raise InvalidRequest(field, "is required")
    return limited(value, field, max_chars=max_chars)


def limited(value: str, field: str, *, max_chars: int = 256) -> str:
    """Return a text of limited length. Raises: InvalidRequest."""
    if len(value) > max_chars:
        raise InvalidRequest(field, f"has {len(value)} characters; at most {max_chars}")
    return value


def request_id_of(value: str, field: str = "request_id") -> str:
    """Return a request id. Raises: InvalidRequest."""
    if not value:
        raise InvalidRequest(field, "is required; make one per request, such as a UUID4, and keep it on retries")
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest(field, "must be 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def int_in_range(value: int, field: str, *, low: int, high: int, default: int | None = None) -> int:
    """Return an integer within [low, high]; 0 means `default` if there is one. Raises: InvalidRequest."""
    if value == 0 and default is not None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(field, f"{value} is outside [{low}, {high}]")
    return value


def seconds(
    value: Duration | None,
    field: str,
    *,
    high: float,
    low: float | None = None,
    above: float | None = None,
    default: float | None = None,
) -> float:
    """Return a duration in seconds within [low, high] or (above, high].

    Raises:
        InvalidRequest: Out of range, or absent without a default.
    """
    if value is None:
        if default is None:
            raise InvalidRequest(field, "is required")
        return default
    length_s: float = value.seconds + value.nanos / 1e9
    too_short = (low is not None and length_s < low) or (above is not None and length_s <= above)
    if too_short or length_s > high:
        lower = f"({above:g}" if above is not None else f"[{low:g}"
        raise InvalidRequest(field, f"{length_s:g} s is outside {lower} s, {high:g} s]")
    return length_s


def duration_of(length_s: float) -> Duration:
    """Return a duration message, to the microsecond."""
    duration = Duration()
    duration.FromMicroseconds(round(length_s * 1e6))
    return duration
