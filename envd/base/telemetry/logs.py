"""Logs on standard error: text for people, or one JSON object per line, with ids.

`bound(episode_id=..., machine_id=...)` adds ids to every record inside it, from any module, in the same task and in
tasks started there. Records of libraries use the same handler, from warnings upwards.
"""

import json
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

_ids: ContextVar[Mapping[str, str] | None] = ContextVar("envd_log_ids", default=None)
_OURS = "envd"
_HANDLER = "envd-stderr"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@contextmanager
def bound(**ids: str) -> Iterator[None]:
    """Add ids to every record in the block; an inner value hides an outer one of the same name."""
    token = _ids.set({**(_ids.get() or {}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def setup(*, log_format: Literal["text", "json"] = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send logs to `stream`, by default standard error; replaces the handler of an earlier call."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name(_HANDLER)
    handler.addFilter(_add_ids)
    handler.addFilter(_limit_traces)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    _traced.clear()
    root = logging.getLogger()
    for earlier in [known for known in root.handlers if known.name == _HANDLER]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_OURS).setLevel(level.upper())


def _add_ids(record: logging.LogRecord) -> bool:
    # Added when the record is created, not when it is formatted: a queue or thread in between has other ids.
    record.ids = dict(_ids.get() or {})
    return True


#: A traceback is repeated after this time. It has 20 to 60 lines, and a caller may cause hundreds per second.
_TRACE_INTERVAL_S = 60.0
_MAX_TRACES = 256
_traced: OrderedDict[tuple[object, ...], float] = OrderedDict()
"""When the traceback of each cause was last logged: a logger, a type of exception, and where it was raised."""


def _limit_traces(record: logging.LogRecord) -> bool:
    """Replace a traceback that was logged within the last minute by the exception's text."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ()
    cause = (record.name, type(error).__qualname__, *where)
    if record.created < _traced.get(cause, -_TRACE_INTERVAL_S) + _TRACE_INTERVAL_S:
        record.msg, record.args = f"{record.getMessage()}: {error!r} (its traceback was logged less than 1 min ago)", ()
        record.exc_info = record.exc_text = None
        return True
    _traced[cause] = record.created
    _traced.move_to_end(cause)
    if len(_traced) > _MAX_TRACES:
        _traced.popitem(last=False)
    return True


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO    envd.pool.pool: message  [episode_id=e1 machine_id=m1]`, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text; a traceback follows on further lines."""
        ids = _one_line(" ".join(f"{key}={value}" for key, value in _record_ids(record).items()))
        stamp = _utc(record).strftime("%H:%M:%S.%f")[:-3]
        text = f"{stamp} {record.levelname:<7} {record.name}: {_one_line(record.getMessage())}" + (
            f"  [{ids}]" if ids else ""
        )
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time`, `level`, `logger`, `message`, the ids, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _utc(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_record_ids(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def _one_line(text: str) -> str:
    """Escape control characters: text of clients and guests must not look like a log line of ours."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def _record_ids(record: logging.LogRecord) -> Mapping[str, str]:
    ids: Mapping[str, str] = getattr(record, "ids", {})
    return ids


def _utc(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)
