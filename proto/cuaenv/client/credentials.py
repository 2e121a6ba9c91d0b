"""Credentials of a client: a token sent with every call, and TLS with a private certificate authority.

A token is a secret: it is never in a log, repr or error, and is sent in clear text only within the host.
"""

import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from cuaenv.argument_types import Checked

#: Environment variable that holds the default token.
TOKEN_VARIABLE: Final = "ENVD_TOKEN"  # noqa: S105 -- the name of a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls(Checked):
    """PEM files for an encrypted connection; read when a client connects."""

    ca: Path
    """Certificate authority of the daemon; no other is trusted."""
    cert: Path | None = None
    """This client's certificate, for a daemon that requires one."""
    key: Path | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        """Raises: TypeError: A field is not a path. ValueError: Only one of `cert` and `key` is given."""
        Checked.__post_init__(self)
        if (self.cert is None) != (self.key is None):
            raise ValueError("Tls: only one of cert and key is given; give both or neither")

    def credentials(self, ca: str = "") -> grpc.ChannelCredentials:
        """Read the files; `ca` replaces the authority. Raises: OSError: one cannot be read. ValueError: not PEM."""
        authority = ca.encode() or self.ca.read_bytes()
        if b"CERTIFICATE-----" not in authority:  # gRPC would only report it as an unreachable daemon
            raise ValueError(f"Tls.ca {self.ca}: has no PEM certificate; give the authority's, such as ca.pem")
        return grpc.ssl_channel_credentials(
            root_certificates=authority,
            private_key=self.key.read_bytes() if self.key else None,
            certificate_chain=self.cert.read_bytes() if self.cert else None,
        )


class Access:
    """A client's token and TLS, applied to its connections and calls."""

    def __init__(self, *, token: str | None, tls: Tls | None, environ: Mapping[str, str] = os.environ) -> None:
        """Take the given token, or that of `ENVD_TOKEN`.

        Raises:
            ValueError: The token is malformed.
        """
        token = (environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        if not token.isascii() or not all(char.isprintable() and char != " " for char in token):
            raise ValueError("the token is malformed: white space or non-ASCII characters; see `envd tokens new`")
        self._token = token
        self._tls = tls
        self.has_tls = tls is not None

    def __repr__(self) -> str:
        token = "a token" if self._token else "no token"
        return f"<Access with {token}, {self._tls or 'without TLS'}>"

    def check(self, target: str, *, ca: str = "") -> None:
        """Check that the token may be sent there. Raises: ValueError: it would leave the host in clear text."""
        if self._token and self._tls is None and not ca and not is_local(target):
            raise ValueError(
                f"{target} is on another host and would get the token in clear text;"
                " give tls=Tls(ca=...), or connect through an SSH tunnel"
            )

    def open_channel(self, target: str, options: Sequence[tuple[str, int | str]], *, ca: str = "") -> grpc.aio.Channel:
        """Return a channel; it connects at its first call.

        Args:
            ca: Certificate authority of this daemon, PEM; empty for that of `Tls`.
        """
        self.check(target, ca=ca)
        if self._tls is not None:
            return grpc.aio.secure_channel(target, self._tls.credentials(ca), options=options)
        if ca:
            return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca.encode()), options=options)
        return grpc.aio.insecure_channel(target, options=options)

    def authorized(self, stub: Any) -> Any:
        return _AuthorizedStub(stub, self._token) if self._token else stub


class _AuthorizedStub:
    def __init__(self, stub: Any, token: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self._stub).__name__}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._stub, name)

        def call(*args: Any, metadata: tuple[tuple[str, str], ...] = (), **kwargs: Any) -> Any:
            return method(*args, metadata=(*self._metadata, *metadata), **kwargs)

        return call


def is_local(target: str) -> bool:
    """Return whether a gRPC target is on this host; False if uncertain."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        if target.startswith(scheme):
            target = target.removeprefix(scheme)
            break
    host = target.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
