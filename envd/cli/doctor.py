"""`envd doctor`: checks this host, and shows how to fix each problem.

The checks are in the rooms that they examine; those of a running daemon, which need a client, are here. All are
guarded: a check that fails with an exception is a finding, and the others still run.
"""

import asyncio
import getpass
import importlib.metadata
import json
import platform
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, err, out
from cuaenv.client import EnvError, Pool, RetryPolicy, Tls, Unauthenticated
from cuaenv.client.connection import DaemonConnection
from cuaenv.client.credentials import TOKEN_VARIABLE, Access
from cuaenv.client.results import read_pool
from cuaenv.client.targets import Address
from cuaenv.v1 import env_pb2
from envd.api.checks import check_port, check_security
from envd.api.security.tls import name_of
from envd.base.checks import HostCheck, Status, check_directory, fail, ok, warn
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.base.sandbox.probe import check_sandbox
from envd.base.version import DISTRIBUTION, envd_version
from envd.cli.command import command
from envd.cli.options import config_options
from envd.cli.remote import TlsCert, TlsKey
from envd.daemon.state_lock import holder
from envd.hypervisor.oci.checks import check_containers, unused_by_containers
from envd.hypervisor.qemu.checks import check_host_name, check_kvm, check_libvirt, check_qemu, check_qemu_img
from envd.images.checks import (
    check_firmware,
    check_images,
    check_mmdebstrap,
    check_qemu_user,
    check_tpm,
    check_unpacking,
)
from envd.integrations.osworld.environment import check_osworld
from envd.pool.room import check_memory, read_available_bytes

#: What a check returns.
_Found = HostCheck | Sequence[HostCheck]


def check_pool(pool: Pool) -> HostCheck:
    """Report the health of a pool of a running daemon."""
    if pool.is_failing:
        health, status = "failing", Status.FAIL
    elif pool.problem:
        health, status = "degraded", Status.WARN
    else:
        health, status = "healthy", Status.OK
    return HostCheck(
        name=f"pool {pool.name}",
        status=status,
        detail=f"{health}, {pool.leased_count} of {pool.resident_count} machines leased, {pool.waiting_count} requested"
        f"{f'; {pool.problem}' if pool.problem else ''}",
        fix="fix the problem above; the pool retries automatically" if pool.problem else "",
    )


async def check_daemon(
    config: Config, *, daemon_pid: int | None, tls: Tls | None = None, timeout: timedelta = timedelta(seconds=5)
) -> list[HostCheck]:
    """Check the pools of the daemon that uses this state directory, if one runs.

    Args:
        tls: How to connect; by default only the daemon's own certificate is trusted.
    """
    if daemon_pid is None:
        return [ok("daemon", f"not running in {config.state_dir}")]
    where, security = f"process {daemon_pid} on {config.listen}", config.security
    if config.listen.endswith(":0"):
        detail = f"{where} chose a free port, which only its output shows; its pools were not checked"
        return [ok("daemon", detail)]
    if security.client_ca is not None and tls is None:
        detail = f"{where} requires client certificates; give --tls-cert and --tls-key to check its pools"
        return [ok("daemon", detail)]
    name = ""
    try:
        if security.tls_cert is not None:
            tls = tls or Tls(ca=security.tls_cert)
            name = name_of(security.tls_cert.read_bytes())
        # The token is sent only to a daemon that has tokens: another program may listen on the port.
        access = Access(token=None if security.tokens_file else "", tls=tls)
        retry = RetryPolicy(connect_timeout=timeout)
        connection = DaemonConnection(Address(config.listen, f"{name}:443" if name else ""), access=access, retry=retry)
        try:
            found = await connection.call("ListPools", env_pb2.ListPoolsRequest(), timeout)
        finally:
            await connection.aclose()
    except Unauthenticated as error:
        detail = f"{where} responds, but its pools were not checked: {error.args[0]}"
        return [ok("daemon", f"{detail}; set {TOKEN_VARIABLE} to one of its tokens")]
    except (EnvError, ValueError) as error:
        return [
            warn(
                "daemon",
                f"{where} does not respond: {error}",
                fix="use the daemon's own --config or --listen; a daemon that is starting responds soon",
            )
        ]
    pools = [read_pool(pool, config.listen) for pool in found.pools]
    return [ok("daemon", f"{where} responds"), *map(check_pool, pools)]


async def examine(config: Config, *, tls: Tls | None = None) -> list[HostCheck]:
    """Run all checks."""
    pid, now = holder(config.state_dir), datetime.now(UTC)
    reserve_bytes = config.limits.disk_reserve_mib << 20
    checks: dict[str, Callable[[], _Found | Awaitable[_Found]]] = {
        "python": lambda: ok("python", f"{platform.python_version()}, envd {envd_version()}"),
        "qemu-system-x86_64": lambda: unused_by_containers(config, "qemu-system-x86_64") or check_qemu(),
        "qemu-img": check_qemu_img,
        "libvirt": lambda: unused_by_containers(config, "libvirt") or check_libvirt(config),
        "containers": lambda: check_containers(config),
        "kvm": lambda: unused_by_containers(config, "kvm") or check_kvm(config),
        "qemu_user": lambda: unused_by_containers(config, "qemu_user") or check_qemu_user(config),
        "firmware": lambda: unused_by_containers(config, "firmware") or check_firmware(config),
        "tpm": lambda: unused_by_containers(config, "tpm") or check_tpm(config),
        "mmdebstrap": check_mmdebstrap,
        "state_dir": lambda: check_directory("state_dir", config.state_dir, reserve_bytes=reserve_bytes),
        "cache_dir": lambda: check_directory("cache_dir", config.cache_dir),
        "memory": lambda: check_memory(config, available_bytes=read_available_bytes(), daemon_pid=pid),
        "images": lambda: check_images(config, now=now),
        "unpacking": lambda: check_unpacking(config),
        "osworld": lambda: check_osworld(config),
        "sandbox": check_sandbox,
        "host_name": check_host_name,
        "security": lambda: check_security(config, now=now),
        "listen": lambda: check_port("listen", config.listen, daemon_pid=pid),
        "metrics_listen": lambda: check_port("metrics_listen", config.metrics_listen, daemon_pid=pid),
        "daemon": lambda: check_daemon(config, daemon_pid=pid, tls=tls),
    }
    return [found for name, check in checks.items() for found in await _guarded(name, check)]


async def _guarded(name: str, check: Callable[[], _Found | Awaitable[_Found]]) -> Sequence[HostCheck]:
    """Run a check; an exception is a finding."""
    try:
        found = check()
        found = await found if isinstance(found, Awaitable) else found
    except ModuleNotFoundError as error:
        return [fail(name, f"{error.name} is not installed", fix="for real machines: pip install 'envd-trainer[host]'")]
    except OSError as error:
        return [fail(name, f"the check failed: {error}", fix="correct the file or its rights, or run as its owner")]
    except Exception as error:
        return [fail(name, f"the check failed: {error!r}", fix="report this as a bug")]
    return [found] if isinstance(found, HostCheck) else found


def _packages() -> dict[str, str]:
    """Return the versions of the packages that this distribution names."""
    wanted = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in importlib.metadata.requires(DISTRIBUTION) or ()}
    installed = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    return {name: installed[name.lower()] for name in sorted(wanted) if name.lower() in installed}


def _published(value: dict[str, Any]) -> Any:
    """Return a finding without names of people and hosts, directories and addresses."""
    text = json.dumps(value)
    replaced = [(socket.gethostname(), "HOST")]
    with suppress(KeyError, OSError, RuntimeError):  # a container may run as a user without a name or a home
        replaced += [(getpass.getuser(), "USER"), (str(Path.home()), "HOME")]
    for private, public in replaced:
        text = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", public, text)
    # Paths outside the system's directories, and addresses.
    text = re.sub(r"(?<![\w.:/])/(?!usr/|dev/|proc/|sys/)[\w.@+-]+(?:/[\w.@+-]+)*", "PATH", text)
    text = re.sub(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?!\.)", "ADDRESS", text)
    return json.loads(text)


_COLOURS: Mapping[Status, str] = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


@command(config_options("listen", "state_dir", "cache_dir", "hypervisor", "accelerator"))
def doctor(
    settings: Config,
    *,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print JSON that can be published: no name, path or address of this host.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this host, and show how to fix each problem."""
    if not (as_json or report):
        err.print("checking; this may take a few seconds")
    try:
        trusted = settings.security.tls_cert
        tls = Tls(ca=trusted, cert=tls_cert, key=tls_key) if trusted and (tls_cert or tls_key) else None
    except ValueError as error:
        raise ConfigError(f"--tls-cert, --tls-key: {error}") from error
    checks = asyncio.run(examine(settings, tls=tls))
    worst = max((check.status for check in checks), key=list(Status).index)
    if as_json or report:
        found = [{**asdict(check), "status": check.status.value} for check in checks]
        described = {"status": worst.value, "host": platform.platform(), "checks": found}
        emit_json(_published(described | {"packages": _packages()}) if report else described)
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for check in checks:
            fix = f"\n[dim]fix: {escape(check.fix)}[/]" if check.fix else ""
            colour = _COLOURS[check.status]
            table.add_row(f"[{colour}]{check.status.value}[/]", check.name, escape(check.detail) + fix)
        out.print(table)
    if worst is Status.FAIL:
        raise typer.Exit(EXIT_FAILED)
