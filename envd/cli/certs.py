"""`envd certs`: creates development certificates, and prints the settings that use them."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit_json, out
from envd.base.errors import ConfigError
from envd.cli.certificates import VALID_DAYS, DevelopmentCerts, make_development_certs
from envd.cli.command import command


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
    created = make_development_certs(host or [], now=datetime.now(UTC))
    files = write_certs(directory, created)
    settings = {key: str(files[name]) for key, name in _SETTINGS.items()}
    if as_json:
        emit_json(
            {
                "files": {name: str(path) for name, path in files.items()},
                "expire_time": created.expire_time.isoformat(),
                "settings": settings,
            }
        )
        return
    lines = [
        f"created {len(files)} files in {directory}, valid for {VALID_DAYS} days",
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
        "  from trainer.client import EnvClient, Tls",
        f'  tls = Tls(ca=Path("{files["ca"].name}"),'
        f' cert=Path("{files["client"].name}"), key=Path("{files["client_key"].name}"))',
        '  EnvClient("HOST:PORT", tls=tls)',
        "",
        f"Keep {files['ca_key'].name} secret: with it anyone can create certificates that daemon and clients trust.",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


_SETTINGS = {"security.tls_cert": "server", "security.tls_key": "server_key", "security.client_ca": "ca"}


def write_certs(directory: Path, certs: DevelopmentCerts) -> dict[str, Path]:
    """Write the files, with mode 0600 for keys, and return them by name.

    Raises:
        ConfigError: A file exists already, and nothing was written; or a file cannot be written.
    """
    contents = {
        "ca": ("ca.pem", certs.ca.cert_pem),
        "ca_key": ("ca.key", certs.ca.key_pem),
        "server": ("server.pem", certs.server.cert_pem),
        "server_key": ("server.key", certs.server.key_pem),
        "client": ("client.pem", certs.client.cert_pem),
        "client_key": ("client.key", certs.client.key_pem),
    }
    files = {name: directory / file_name for name, (file_name, _) in contents.items()}
    existing = [str(path) for path in files.values() if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError(f"{', '.join(existing)}: already exists, and is never overwritten; use another directory")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, (_, content) in contents.items():
            # The mode is set at creation, and O_EXCL refuses a symbolic link created in the meantime.
            mode = 0o600 if name.endswith("_key") else 0o644
            descriptor = os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        reason = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"{directory}: cannot write certificates: {reason}; use another directory") from error
    return files
