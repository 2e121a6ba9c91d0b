"""`envd compat`: serves a protocol of another system, as a client of a daemon."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvloop

from cuaenv.cli.terminal import out
from envd.api.security.http import tls_context
from envd.base.config import SecurityConfig
from envd.base.config_values import COMPAT_PORTS, compat_endpoint, is_local
from envd.base.errors import ConfigError
from envd.base.sandbox.enclosure import die_with_parent
from envd.base.telemetry import logs
from envd.cli.command import command
from envd.cli.remote import DAEMON_OPTIONS, RemoteDaemon
from envd.integrations.compat.callers import Callers
from envd.integrations.compat.server import serve_protocol

_Endpoint = Annotated[
    str, typer.Argument(metavar="NAME[=HOST:PORT]", help=f"The protocol: {', '.join(COMPAT_PORTS)}; and its address.")
]
_Cert = Annotated[
    Path | None,
    typer.Option("--serve-cert", metavar="FILE", help="Certificate for this server's clients; enables TLS."),
]
_Key = Annotated[Path | None, typer.Option("--serve-key", metavar="FILE", help="Its private key.")]
_ClientCa = Annotated[
    Path | None,
    typer.Option("--serve-client-ca", metavar="FILE", help="Certificate authority that clients' certificates need."),
]
_MaxSteps = Annotated[
    int, typer.Option(min=1, help="Most steps of an episode of windows-vm, at most the daemon's limits.max_steps.")
]
_LogFormat = Annotated[Literal["text", "json"], typer.Option(help="Log format: text or json.")]
_LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="Log level: debug, info, warning or error.")
]
#: The daemon that starts this process; it ends with it.
_Parent = Annotated[int, typer.Option(hidden=True)]


@command(DAEMON_OPTIONS)
def compat(
    daemon: RemoteDaemon,
    *,
    endpoint: _Endpoint,
    serve_cert: _Cert = None,
    serve_key: _Key = None,
    serve_client_ca: _ClientCa = None,
    max_steps: _MaxSteps = 1000,
    log_format: _LogFormat = "text",
    log_level: _LogLevel = "info",
    parent: _Parent = 0,
) -> None:
    """Serve a protocol of another system on the desktops of a daemon.

    Runs until SIGTERM or Ctrl-C, which closes its episodes. Each request's own token goes to the daemon; ENVD_TOKEN is
    not used.
    """
    if parent:
        die_with_parent()
        if os.getppid() != parent:
            return  # it ended before
    logs.setup(log_format=log_format, level=log_level)
    try:
        name, _, listen = compat_endpoint(endpoint).partition("=")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if (serve_cert is None) != (serve_key is None) or (serve_client_ca is not None and serve_cert is None):
        raise ConfigError("--serve-cert, --serve-key and --serve-client-ca: give both of the first to encrypt")
    security = SecurityConfig(tls_cert=serve_cert, tls_key=serve_key, client_ca=serve_client_ca)
    callers: Callers[Any] = Callers(daemon.envd, tls=daemon.tls(), max_steps=max_steps)
    uvloop.run(_serve(name, listen, callers, security))


async def _serve(name: str, listen: str, callers: Callers[Any], security: SecurityConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tls = tls_context(security, on_stale=lambda _: None)
    try:
        await callers.start()
        is_guarded = tls is not None and (callers.requires_token or security.client_ca is not None)
        if not is_local(listen) and not is_guarded:
            raise ConfigError(
                f"{listen}: can be reached from other hosts, which needs TLS, and tokens of the daemon or client"
                " certificates; give --serve-cert and --serve-key, or listen on 127.0.0.1"
            )
        async with serve_protocol(name, listen, callers, tls=tls) as address:
            scheme = "http" if tls is None else "https"
            out.print(f"protocol {name} on {scheme}://{address}", markup=False, soft_wrap=True)
            await stop.wait()
    finally:
        await callers.aclose()
