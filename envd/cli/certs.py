"""`envd certs`: creates a development authority with certificates, and prints the settings that use them.

For tests and small setups: the authority's key can issue more certificates, and none is ever revoked.
"""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import trustme
import typer

from cuaenv.cli.terminal import Json, emit_json, out
from envd.base.errors import ConfigError
from envd.cli.command import command

_VALID_FOR = timedelta(days=365)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: Certificates of trustme are valid for servers too, so that of the client names no host: it can be none of them.
_CLIENT = "client.invalid"
_ORGANIZATION = "envd development"
_FILES = {
    "ca": "ca.pem",
    "ca_key": "ca.key",
    "server": "server.pem",
    "server_key": "server.key",
    "client": "client.pem",
    "client_key": "client.key",
}
_SETTINGS = {"security.tls_cert": "server", "security.tls_key": "server_key", "security.client_ca": "ca"}


@command()
def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory; created if missing.")],
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME", help="Name or address that clients connect to, besides loopback; repeatable."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a development CA with certificates for a server and a client."""
    directory = directory.absolute()
    now = datetime.now(UTC)
    files = write_certs(directory, make_development_certs(host or [], now=now))
    settings = {key: str(files[name]) for key, name in _SETTINGS.items()}
    if as_json:
        emit_json(
            {
                "files": {name: str(path) for name, path in files.items()},
                "expire_time": (now + _VALID_FOR).isoformat(timespec="seconds"),
                "settings": settings,
            }
        )
        return
    lines = [
        f"created {len(files)} files in {directory}, valid for {_VALID_FOR.days} days",
        "",
        "The daemon's configuration:",
        "",
        "  [security]",
        *(f'  {key.removeprefix("security.")} = "{path}"' for key, path in settings.items()),
        "",
        "client_ca requires a certificate from every client; leave it out if clients use tokens (`envd tokens new`).",
        "",
        "Clients, with copies of these files:",
        "",
        "  from pathlib import Path",
        "  from cuaenv.client import EnvClient, Tls",
        f'  tls = Tls(ca=Path("{files["ca"].name}"),'
        f' cert=Path("{files["client"].name}"), key=Path("{files["client_key"].name}"))',
        '  EnvClient("HOST:PORT", tls=tls)',
        "",
        f"Keep {files['ca_key'].name} secret: with it anyone can create certificates that daemon and clients trust.",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def make_development_certs(hosts: Sequence[str], *, now: datetime) -> dict[str, bytes]:
    """Return the PEM files of an authority, a server with these names and loopback, and a client, by name.

    Args:
        now: The certificates of server and client end a year later.

    Raises:
        ConfigError: A host is neither a DNS name nor an IP address.
    """
    names = [_checked(host) for host in dict.fromkeys([*hosts, *_LOOPBACK])]
    authority = trustme.CA(organization_name=_ORGANIZATION)

    def issue(*identities: str) -> trustme.LeafCert:
        return authority.issue_cert(*identities, organization_name=_ORGANIZATION, not_after=now + _VALID_FOR)

    server, client = issue(*names), issue(_CLIENT)
    return {
        "ca": authority.cert_pem.bytes(),
        "ca_key": authority.private_key_pem.bytes(),
        "server": server.cert_chain_pems[0].bytes(),
        "server_key": server.private_key_pem.bytes(),
        "client": client.cert_chain_pems[0].bytes(),
        "client_key": client.private_key_pem.bytes(),
    }


def write_certs(directory: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """Write the files of `make_development_certs`, with mode 0600 for keys, and return them by name.

    Raises:
        ConfigError: A file exists already, and nothing was written; or a file cannot be written.
    """
    files = {name: directory / _FILES[name] for name in contents}
    existing = [str(path) for path in files.values() if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError(f"{', '.join(existing)}: already exists, and is never overwritten; use another directory")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in contents.items():
            # The mode is set at creation, and O_EXCL refuses a symbolic link created in the meantime.
            mode = 0o600 if name.endswith("_key") else 0o644
            descriptor = os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        reason = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"{directory}: cannot write certificates: {reason}; use another directory") from error
    return files


def _checked(host: str) -> str:
    """Return a name for a certificate. trustme would take networks and addresses of people too."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if not host.isascii() or len(host) > 253 or not all(label.replace("-", "").isalnum() for label in labels):
        raise ConfigError(f"--host {host}: neither a DNS name nor an IP address; leave out scheme and port")
    return host
