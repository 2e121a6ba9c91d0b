"""The command `envd forward`: a local port that leads to a port of an episode's guest."""

import asyncio
import logging
from typing import Annotated

import typer

from cuaenv.cli.terminal import err, out
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.remote import CALL_TIMEOUT, DAEMON_OPTIONS, RemoteDaemon

_Port = Annotated[int, typer.Argument(metavar="PORT", min=1, max=65_535, help="A TCP port of the guest.")]
_LocalPort = Annotated[
    int, typer.Option("--local", metavar="PORT", min=0, max=65_535, help="Port of this host; by default a free one.")
]


@command(DAEMON_OPTIONS)
def forward(
    daemon: RemoteDaemon,
    *,
    episode_id: Annotated[str, typer.Argument(metavar="EPISODE", help="An episode's id.")],
    port: _Port,
    local_port: _LocalPort = 0,
) -> None:
    """Forward a local port to a port of an episode's guest.

    Prints the local address, and runs until Ctrl-C or the end of the episode. The guest runs while a connection is
    open. Bytes renew the episode's lease; an idle connection does not.
    """
    _show_connections()

    async def serve() -> None:
        async with daemon.client() as client:
            episode = await client.get_episode(episode_id, timeout=CALL_TIMEOUT)
            try:
                async with client.forward(episode, port, local_port=local_port, timeout=CALL_TIMEOUT) as forwarding:
                    out.print(forwarding.address)
                    err.print(f"leads to port {port} of {episode_id}; Ctrl-C ends it", markup=False, soft_wrap=True)
                    await forwarding.wait()
            except OSError as error:
                raise ConfigError(
                    f"--local {local_port}: cannot listen: {error.strerror}; choose another port"
                ) from error

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        err.print("closed")


def _show_connections() -> None:
    """Print why connections fail."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("cuaenv.client.forwarding")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    logger.propagate = False
