"""`trainer mcp`: an MCP server, for agents that act on desktops by tools."""

import asyncio
import socket
from datetime import timedelta
from typing import Annotated

import typer

from cuaenv.cli.terminal import err
from trainer.adapters.session import SessionSettings
from trainer.cli.options import DEFAULT_TARGET, PoolName, RunName, Target, TlsCa, make_client
from trainer.cli.output import UsageError, reports_errors

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@reports_errors(OSError)
def mcp_command(
    *,
    target: Target = DEFAULT_TARGET,
    tls_ca: TlsCa = None,
    run: RunName = "mcp",
    pool: PoolName = "",
    task: Annotated[str, typer.Option(help="Task of a reset that names none.")] = "",
    max_steps: Annotated[int, typer.Option(min=0, help="Most steps of an episode; 0 for the task's own limit.")] = 0,
    idle: Annotated[
        float, typer.Option(min=1, max=1440, help="Close a session that was not used for this many minutes.")
    ] = 30,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve streamable HTTP on this loopback address, not on stdio.")
    ] = "",
) -> None:
    """Serve desktops as MCP tools: reset, step, observe, evaluate, close."""
    try:
        from trainer.adapters.mcp import make_server, serve_http  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise UsageError(f"trainer mcp: {error.name} is missing; install envd-trainer[mcp]") from error
    make_client(target, tls_ca)  # a wrong target or file is an error now, not at the first reset
    settings = SessionSettings.connect(
        target, run=run, tls_ca=tls_ca, pool=pool, max_steps=max_steps, idle_timeout=timedelta(minutes=idle)
    )
    server = make_server(settings, task=task)
    if not http:
        server.run("stdio")
        return
    host, _, port = http.rpartition(":")
    if host not in _LOOPBACK or not port.isdigit() or int(port) >= 1 << 16:
        raise UsageError(f"--http {http}: not a loopback address; use 127.0.0.1:PORT, and a tunnel from other hosts")
    with socket.create_server((host, int(port))) as listener:
        err.print(f"serving MCP at http://{host}:{listener.getsockname()[1]}/mcp", markup=False, soft_wrap=True)
        asyncio.run(serve_http(server, listener))
