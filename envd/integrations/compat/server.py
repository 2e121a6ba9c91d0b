"""Serves the protocols that are switched on, each on an address of its own."""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Middleware

from envd.api.security.guard import Guard
from envd.base.telemetry.endpoint import serve_app
from envd.integrations.compat.areal import Areal
from envd.integrations.compat.areal_sandbox import ArealSandbox
from envd.integrations.compat.protocols import MAX_BODY_BYTES, Routes
from envd.integrations.compat.sessions import Sessions
from envd.integrations.compat.slime_osworld import SlimeOsworld
from envd.integrations.compat.windows_vm import WindowsVm

#: The protocols by name; each adds its routes.
PROTOCOLS: Mapping[str, Callable[[Sessions, Routes], object]] = {
    "slime-osworld": SlimeOsworld,
    "areal": Areal,
    "areal-sandbox": ArealSandbox,
    "windows-vm": WindowsVm,
}


@asynccontextmanager
async def serve_compat(
    addresses: Mapping[str, str],
    sessions: Sessions,
    guard: Guard,
    *,
    tls: ssl.SSLContext | None = None,
    middlewares: Sequence[Middleware] = (),
) -> AsyncIterator[dict[str, str]]:
    """Serve protocols and yield their bound addresses by name.

    Args:
        addresses: HOST:PORT by protocol, port 0 for a free one.

    Raises:
        ConfigError: An address cannot be bound.
    """
    bound: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name, listen in addresses.items():
            app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
            routes = Routes(app, guard)
            PROTOCOLS[name](sessions, routes)
            routes.add_unknown()
            bound[name] = await stack.enter_async_context(serve_app(app, listen, setting=f"compat {name}", tls=tls))
        yield bound
