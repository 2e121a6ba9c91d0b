"""Spans and W3C trace context of a process that uses OpenTelemetry. In any other process these functions do nothing.

OpenTelemetry is never imported here first: without it in the process there is no span to continue.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_API: Final = "opentelemetry.trace"


@contextmanager
def span(name: str, **attributes: str) -> Iterator[None]:
    """Record the block as a span below the current one, with the process's tracer provider."""
    trace = sys.modules.get(_API)
    # Without a provider, which records nothing, OpenTelemetry takes as long for a span as a small call.
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield
        return
    with trace.get_tracer("cuaenv").start_as_current_span(name, attributes=attributes):
        yield


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Return the metadata `traceparent` and `tracestate` of the current span; empty if there is none."""
    if _API not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return tuple(headers.items())
