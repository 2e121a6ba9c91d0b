"""Traces: spans of calls and their phases, sent to an OpenTelemetry collector over OTLP.

Off by default: then nothing of OpenTelemetry is imported, and every function here returns at once. When on, a call
continues the trace of its client (W3C `traceparent`). Spans wait in a queue of bounded length, and a thread sends
them: a collector that is slow or down costs spans, never a call.
"""

import asyncio
import importlib
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from envd.base.clock import Clock
from envd.base.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

#: How long the end of the daemon waits for the last spans to be sent.
_FLUSH_TIMEOUT_S: Final = 2.0
#: Calls without a span: they are polled, or last as long as their client.
_UNTRACED: Final = frozenset({"KeepAlive", "ListPools", "ListEpisodes"})

_OFF: Final = nullcontext()

_tracer: "Tracer | None" = None


@asynccontextmanager
async def exported_traces(endpoint: str, *, flush_timeout_s: float = _FLUSH_TIMEOUT_S) -> AsyncIterator[None]:
    """Send traces to a collector during the block; with an empty `endpoint`, do nothing.

    The standard `OTEL_...` variables apply: service name, resource attributes, sampler, headers, timeout, queue.

    Args:
        endpoint: URL of the collector's OTLP receiver for HTTP, without `/v1/traces`; empty for no traces.
        flush_timeout_s: Longest wait at the end for spans that were not sent.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    global _tracer  # noqa: PLW0603 -- one daemon per process, and every layer records phases
    if not endpoint:
        yield
        return
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint: the Python module {error.name} is missing; run pip install 'envd-trainer[otlp]'"
        ) from error
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
    resource = Resource.create({"service.name": "envd"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("envd")
    try:
        yield
    finally:
        _tracer = None
        if not await _flushed(provider, flush_timeout_s):
            # Interrupts an export that retries.
            exporter.shutdown()  # type: ignore[no-untyped-call]


async def _flushed(provider: "TracerProvider", timeout_s: float) -> bool:
    """Send the spans that wait, in a thread that does not keep the process alive; return whether it ended in time."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()

    def send() -> None:
        provider.shutdown()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(sent.set)

    threading.Thread(target=send, name="traces:flush", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await sent.wait()
    return sent.is_set()


@contextmanager
def call_span(method: str, metadata: Iterable[tuple[str, Any]], ids: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Record a call as a span that continues the client's trace, if there is one; yield ids for logs."""
    if _tracer is None or method in _UNTRACED or "/" in method:
        yield {}
        return
    from opentelemetry.trace import SpanKind, format_trace_id  # noqa: PLC0415

    attributes = {"rpc.system": "grpc", "rpc.method": method, **{f"envd.{name}": ids[name] for name in ids}}
    with _tracer.start_as_current_span(
        method, context=_parent(metadata), kind=SpanKind.SERVER, attributes=attributes
    ) as span:
        yield {"trace_id": format_trace_id(span.get_span_context().trace_id)}


def _parent(metadata: Iterable[tuple[str, Any]]) -> "Context":
    """Return the client's span; a malformed or missing `traceparent` begins a new trace."""
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    headers = {key: value for key, value in metadata if isinstance(value, str)}
    return TraceContextTextMapPropagator().extract(headers, context=Context())


def phase(name: str, duration_s: float) -> None:
    """Record a phase of the present call that ended now."""
    if _tracer is not None:
        end_ns = time.time_ns()
        _tracer.start_span(name, start_time=end_ns - round(duration_s * 1e9)).end(end_ns)


def timed(name: str) -> AbstractContextManager[object]:
    """Record the block as a phase of the present call."""
    return _OFF if _tracer is None else _tracer.start_as_current_span(name)


class Stopwatch:
    """Milliseconds by phase; each phase is also one of the current span."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_s = self._lap_s = clock.monotonic()
        self.timings_ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the phase that began at the previous lap."""
        now_s = self._clock.monotonic()
        self.timings_ms[name] = (now_s - self._lap_s) * 1000
        phase(name, now_s - self._lap_s)
        self._lap_s = now_s

    @property
    def total_ms(self) -> float:
        return (self._clock.monotonic() - self._begin_s) * 1000
