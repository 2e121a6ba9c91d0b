"""The destinations that a guest may reach. Pure."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_WEB_PORTS = (80, 443)
#: Prefixes whose addresses end with an IPv4 address: NAT64 (RFC 6052), IPv4-compatible (RFC 4291).
_EMBEDDING = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
#: Local NAT64 (RFC 8215). Each network chooses the place of the IPv4 address in it.
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")


@dataclass(frozen=True, slots=True)
class Destination:
    """Host and port that a program in the guest connects to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AllowList:
    """Allowed destinations. Entries: `example.org`, `*.example.org`, `example.org:8443`, `192.0.2.7:80`.

    Without a port, 80 and 443. `*.` matches any subdomain, but not the domain itself.
    """

    entries: tuple[str, ...]
    every_public_host: bool = False
    """Whether ports 80 and 443 of every host are listed, as by `*`. Private addresses still need an entry."""

    def allows(self, destination: Destination) -> bool:
        """Return whether a destination is listed."""
        if self.every_public_host and destination.port in _WEB_PORTS:
            return True
        return self._lists(destination)

    def allows_address(self, address: str, destination: Destination) -> bool:
        """Return whether an address of a listed name may be connected to: it is public, or listed itself."""
        return is_public(ip_address(address)) or self._lists(Destination(address, destination.port))

    def _lists(self, destination: Destination) -> bool:
        return any(_matches(entry, destination) for entry in self.entries)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address leads to one host on the internet, also after a gateway has translated it to IPv4."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    if address in _LOCAL_NAT64 or address.is_multicast or address.is_site_local:
        return False
    embedded = address.ipv4_mapped or address.sixtofour
    if any(address in network for network in _EMBEDDING):
        embedded = IPv4Address(address.packed[-4:])
    return address.is_global if embedded is None else is_public(embedded)


def _split(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.partition(":")
    if not colon:
        return host.lower(), None
    return host.lower(), int(port) if port.isascii() and port.isdigit() else 0


def _matches(entry: str, destination: Destination) -> bool:
    host, port = _split(entry)
    if destination.port not in (_WEB_PORTS if port is None else (port,)):
        return False
    name = destination.host.lower().rstrip(".")
    return name.endswith(host[1:]) if host.startswith("*.") else name == host
