"""Targets of a client: parsing, and resolving names to addresses."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cuaenv.client.errors import Unavailable

_DNS: Final = "dns:///"
_RAY: Final = "ray://"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of one daemon."""

    target: str
    authority: str = ""
    """`NAME:PORT` that it was resolved from, for its certificate; empty if the target is the name."""
    ca: str = ""
    """Certificate authority of this daemon, PEM; empty for that of the client."""


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the targets, without duplicates.

    Args:
        targets: `HOST:PORT`, `unix:PATH` or `dns:///NAME:PORT`; several comma-separated, or as a sequence. Or
            `ray://auto` or `ray://HOST:PORT`, alone.

    Raises:
        ValueError: There is none, one has white space or no valid port, or a Ray cluster is not alone.
    """
    texts = [targets] if isinstance(targets, str) else targets
    parsed = [part.strip() for text in texts for part in text.split(",")]
    if not parsed or not all(parsed):
        raise ValueError(f"targets {targets!r} name no host or have an empty part; give HOST:PORT, separated by commas")
    for target in parsed:
        if any(char.isspace() for char in target):
            raise ValueError(f"target {target!r} has white space; separate hosts by commas")
        if target.startswith(("http:", "https:")):
            raise ValueError(f"{target!r} is a URL; give HOST:PORT")
        if not is_ray(target) and not target.startswith(("unix:", "unix-abstract:")):
            _split(target)
        if is_ray(target) and (
            len(parsed) > 1 or not (target == f"{_RAY}auto" or target.rpartition(":")[2].isdecimal())
        ):
            raise ValueError(
                f"target {target!r}: give {_RAY}auto or {_RAY}HOST:PORT of the Ray head, and no other target"
            )
    return tuple(dict.fromkeys(parsed))


def is_ray(target: str) -> bool:
    """Return whether a target is a Ray cluster: `ray://auto`, or `ray://HOST:PORT` of its head."""
    return target.startswith(_RAY)


def is_name(target: str) -> bool:
    """Return whether a target is a name that may resolve to several daemons."""
    return target.startswith(_DNS) or is_ray(target)


async def resolve(target: str) -> tuple[Address, ...]:
    """Return the addresses of a target, in a fixed order; only a `dns:///` name or a Ray cluster may have several.

    Addresses of a name are of one family, IPv4 if there are any: a daemon with both would count twice.

    Raises:
        OSError: The name cannot be resolved now.
        Unreachable: The Ray cluster cannot be reached, or Ray is not installed.
        Unavailable: The Ray cluster has no host that is up.
    """
    if is_ray(target):
        return await asyncio.to_thread(_hosts_of, target)
    if not is_name(target):
        return (Address(target),)
    host, port = _split(target)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses_v4 = sorted({str(address[0]) for family, _, _, _, address in found if family == socket.AF_INET})
    addresses_v6 = sorted({f"[{address[0]}]" for family, _, _, _, address in found if family == socket.AF_INET6})
    return tuple(Address(f"{ip}:{port}", f"{host}:{port}") for ip in addresses_v4 or addresses_v6)


def _hosts_of(cluster: str) -> tuple[Address, ...]:
    from cuaenv.client.ray_cluster import status  # noqa: PLC0415 -- only users of ray:// need it

    reports = sorted((node.report for node in status(cluster)), key=lambda report: report.node)
    up = tuple(Address(report.endpoint, ca=report.ca) for report in reports if report.state == "up")
    if not up:
        states = "; ".join(
            f"{report.node} is {report.state}" + (f": {report.problem}" if report.problem else "") for report in reports
        )
        raise Unavailable(
            f"{cluster}: no host is up: {states or 'none has joined the Ray cluster; run `trainer hosts up`'}",
            host=cluster,
        )
    return up


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.removeprefix(_DNS).rpartition(":")
    if not host or not port.isdecimal():
        missing = "host" if port.isdecimal() else "port"
        raise ValueError(f"no {missing} in {target!r}; give HOST:PORT, unix:PATH or {_DNS}NAME:PORT")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"port {port} of {target!r} is outside [1, 65535]; give HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
