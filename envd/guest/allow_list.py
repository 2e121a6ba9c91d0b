"""Which places a guest may reach. Pure."""

from dataclasses import dataclass
from ipaddress import ip_address

_WEB_PORTS = (80, 443)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program in the guest wants to go."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AllowList:
    """What a guest may reach. Entries: `example.org`, `*.example.org`, `example.org:8443`, `192.0.2.7:80`.

    Without a port, 80 and 443. `*.` stands for any name below, not for the name itself.
    """

    entries: tuple[str, ...]

    def permits(self, place: Place) -> bool:
        """Tell whether a place is listed."""
        return any(_matches(entry, place) for entry in self.entries)

    def permits_address(self, address: str, place: Place) -> bool:
        """Tell whether an address that a listed name stands for may be dialled: a public one, or one that is listed."""
        return ip_address(address).is_global or self.permits(Place(address, place.port))


def _split(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.partition(":")
    if not colon:
        return host.lower(), None
    return host.lower(), int(port) if port.isascii() and port.isdigit() else 0


def _matches(entry: str, place: Place) -> bool:
    host, port = _split(entry)
    if place.port not in (_WEB_PORTS if port is None else (port,)):
        return False
    asked = place.host.lower().rstrip(".")
    return asked.endswith(host[1:]) if host.startswith("*.") else asked == host
