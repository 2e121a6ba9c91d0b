"""The port on which all shards listen (`SO_REUSEPORT`)."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from envd.api.server import ListenAddress
from envd.base.errors import cannot_bind


@contextmanager
def reserved_port(address: ListenAddress) -> Iterator[str]:
    """Reserve the port of an address for this user's processes during the block, and yield `HOST:PORT`.

    The kernel allows all sockets of one user to share a port. So this refuses a port that another daemon listens on.

    Raises:
        ConfigError: The address is not this host's, or the port is taken.
    """
    try:
        reserving = _bound(address)
    except OSError as error:
        raise cannot_bind("listen", address.target, str(error.strerror)) from error
    with reserving:
        yield f"{address.host}:{reserving.getsockname()[1]}"


def _bound(address: ListenAddress) -> socket.socket:
    """Return a socket that shares its port. It never listens, so it gets no connections. Raises: OSError."""
    host = address.host.removeprefix("[").removesuffix("]")
    found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, sockaddr = found[0]
    if address.port:
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of an earlier daemon, closed a minute ago, do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
    reserving = socket.socket(family, kind, protocol)
    try:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserving.bind(sockaddr)
    except OSError:
        reserving.close()
        raise
    return reserving
