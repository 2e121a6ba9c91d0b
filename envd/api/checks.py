"""The checks of `envd doctor` for the addresses, tokens and certificates that clients reach a daemon by."""

import socket
from datetime import datetime

from envd.api.security.tls import expire_time_of, server_credentials
from envd.api.security.tokens import read_tokens
from envd.base.checks import HostCheck, Status, fail, ok
from envd.base.config import Config
from envd.base.errors import ConfigError

_CERT_WARN_DAYS = 14


def check_security(config: Config, *, now: datetime) -> HostCheck:
    """Check that tokens and certificates are valid, and for how long."""
    security, found = config.security, []
    try:
        if security.tokens_file is not None:
            found.append(f"{len(read_tokens(security.tokens_file))} tokens")
        if security.tls_cert is not None and security.tls_key is not None:
            server_credentials(
                cert=security.tls_cert, key=security.tls_key, client_ca=security.client_ca, on_stale=lambda _: None
            )
            left_days = (expire_time_of(security.tls_cert.read_bytes()) - now).days
            found.append(f"TLS{', client certificates' if security.client_ca else ''}, valid for {left_days} days")
            if left_days < _CERT_WARN_DAYS:
                status = Status.FAIL if left_days < 0 else Status.WARN
                detail = f"{security.tls_cert} is valid for {left_days} days"
                return HostCheck(
                    name="security", status=status, detail=detail, fix="replace it; envd reloads it without a restart"
                )
    except ConfigError as error:
        return fail("security", str(error), fix="see the message and docs/security.md")
    if not found:
        return ok("security", "neither TLS nor tokens; only clients on this host are served")
    return ok("security", ", ".join(found))


def check_port(name: str, listen: str, *, daemon_pid: int | None) -> HostCheck:
    """Check that an address is free."""
    if listen.startswith("unix:"):
        return ok(name, f"{listen}; a start replaces the socket if no process listens on it")
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if daemon_pid is not None:
                return ok(name, f"{listen} is in use; envd runs as process {daemon_pid}")
            detail = f"{listen}: {error.strerror}"
            return fail(name, detail, fix=f"stop what listens there, or set {name} to a free port")
    return ok(name, f"{listen} is free")
