"""The HTTP endpoint for Prometheus, `GET /metrics`, and a liveness check, `GET /healthz`.

It runs on the daemon's event loop, so a scrape sees pools between two changes, and a hanging loop fails the scrape.
"""

import asyncio
import logging
import resource
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from envd.base.errors import cannot_bind
from envd.base.telemetry.metrics import CONTENT_TYPE, Metrics

#: aiohttp would log a traceback for each connection that sends no HTTP/1, such as a gRPC client's attempts.
_requests_logger = logging.getLogger(f"{__name__}.requests")
_requests_logger.addFilter(
    lambda record: record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
)

_TLS_HANDSHAKE_S = 10.0


@asynccontextmanager
async def serve_metrics(
    metrics: Metrics, listen: str, *, tls: ssl.SSLContext | None = None, middlewares: Sequence[Middleware] = ()
) -> AsyncIterator[str]:
    """Serve metrics and yield the bound address."""

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application(middlewares=middlewares)
    app.router.add_get("/metrics", scrape)
    app.router.add_get("/healthz", healthz)
    async with serve_app(app, listen, setting="metrics_listen", tls=tls) as address:
        yield address


@asynccontextmanager
async def serve_app(
    app: web.Application, listen: str, *, setting: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve an HTTP application and yield the bound address. A request is cancelled when its client disconnects.

    Connections beyond a quarter of the process's file descriptors are closed at once.

    Args:
        listen: HOST:PORT, port 0 for a free one.
        setting: Name of the setting that has the address.

    Raises:
        ConfigError: The address cannot be bound.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_requests_logger,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    handlers = runner.server
    if handlers is None:
        raise AssertionError("setup() makes the server")

    max_connections = _max_connections()

    def protocol() -> asyncio.Protocol:
        return _Refused() if len(handlers.connections) >= max_connections else handlers()

    try:
        loop = asyncio.get_running_loop()
        host, _, port = listen.rpartition(":")
        try:
            server = await loop.create_server(
                protocol,
                host.strip("[]"),
                int(port),
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _TLS_HANDSHAKE_S,
            )
        except OSError as error:
            reason = (error.strerror or str(error)).rpartition(": ")[2]  # asyncio's text repeats the address
            raise cannot_bind(setting, listen, reason) from error
        try:
            yield f"{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _max_connections() -> int:
    """Return a bound that leaves the daemon most of its file descriptors: idle connections need no token."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.abort()
