"""`envd doctor`: checks this host, and shows how to fix each problem.

Each check examines one thing and changes nothing. A check that fails with an exception is reported as a finding.
"""

import asyncio
import getpass
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, err, out, program
from cuaenv.client import EnvError, Pool, RetryPolicy, Tls, Unauthenticated
from cuaenv.client.connection import Connection
from cuaenv.client.credentials import TOKEN_VARIABLE, Access
from cuaenv.client.results import read_pool
from cuaenv.client.targets import Address
from cuaenv.v1 import env_pb2
from envd.api.security.tls import server_credentials
from envd.api.security.tokens import read_tokens
from envd.base.config import Config, HypervisorConfig, PoolConfig
from envd.base.errors import ConfigError, EnvdError
from envd.base.sandbox.cgroup import find_hierarchy, shortcoming
from envd.base.sandbox.probe import sandbox_problem
from envd.base.version import DISTRIBUTION, envd_version
from envd.cli.certificates import expire_time_of, name_of
from envd.cli.options import with_settings
from envd.cli.remote import TlsCert, TlsKey
from envd.daemon.state_lock import holder
from envd.hypervisor.backends import backend_of, open_hypervisor
from envd.hypervisor.machine import Firmware, Hardware
from envd.hypervisor.oci.backend import is_oci
from envd.hypervisor.qemu.accelerator import probe_kvm
from envd.hypervisor.qemu.backend import is_embedded
from envd.hypervisor.qemu.host import NAME_FIX, find_firmware, required_access, slow_name
from envd.hypervisor.qemu.tpm import PROGRAM as SWTPM
from envd.hypervisor.qemu.user import choose_qemu_user
from envd.images.catalogue import Image, ImageCatalogue
from envd.integrations.osworld.environment import Environment
from envd.pool.memory import booted_bytes, forked_bytes, read_available_bytes

_GIB = 1 << 30
#: The probe takes about 0.1 s if KVM works.
_KVM_PROBE_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 60.0
_TOOL_TIMEOUT_S = 10.0
#: The oldest release that this project was tested with.
_QEMU_MIN = (7, 2)
_CERT_WARN_DAYS = 14
#: An evaluation of a client lasts 90 days.
_EVALUATION_WARN_DAYS = 15
#: A desktop image takes about 1 GiB, its build 4 GiB of scratch space, an episode's overlay about 100 MiB.
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 1 * _GIB, 8 * _GIB
_INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
#: Message buses, panel and file dialogs of one desktop.
_INOTIFY_PER_DESKTOP, _MANY_DESKTOPS = 6, 200


class Status(Enum):
    """Result of a check."""

    #: No problem.
    OK = "ok"
    #: envd works with limitations.
    WARN = "warn"
    #: envd does not work.
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    """The finding."""
    fix: str = ""
    """The remedy; empty without a problem."""


#: What a check returns.
_Found = Check | Sequence[Check]


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.OK, detail=detail)


def _warn(name: str, detail: str, *, fix: str) -> Check:
    return Check(name=name, status=Status.WARN, detail=detail, fix=fix)


def _fail(name: str, detail: str, *, fix: str) -> Check:
    return Check(name=name, status=Status.FAIL, detail=detail, fix=fix)


def _as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"


def _install(package: str) -> str:
    return f"`make deps`, or `{_as_root(f'apt-get install {package}')}`"


def _build(image: str) -> str:
    # sudo does not look for programs in a virtual environment.
    envd = program("envd") if os.geteuid() == 0 else Path(sys.executable).with_name("envd")
    return f"`{_as_root(f'{envd} image build {image}')}`"


def check_tool(
    name: str, *, package: str, purpose: str, version_of: Callable[[str], str], needed: bool = True
) -> Check:
    """Check that a program is on PATH and prints its version."""
    path = shutil.which(name)
    if path is None:
        status = Status.FAIL if needed else Status.WARN
        return Check(name=name, status=status, detail=f"not found; {purpose}", fix=_install(package))
    try:
        return _ok(name, f"{version_of(path)} ({path})")
    except (OSError, subprocess.SubprocessError) as error:
        return _fail(name, f"{path} does not run: {error}", fix=_install(package))


def check_qemu_version(found: Check) -> Check:
    """Check QEMU's version, given the check that it runs."""
    match = re.search(r"\b(\d+)\.(\d+)", found.detail) if found.status is Status.OK else None
    if match is None or (int(match[1]), int(match[2])) >= _QEMU_MIN:
        return found
    minimum = ".".join(map(str, _QEMU_MIN))
    return _warn(found.name, f"{found.detail} is older than {minimum}", fix=f"use QEMU {minimum} or newer")


def check_disk(name: str, directory: Path, *, free_bytes: int, writable: bool, reserve_bytes: int = 0) -> Check:
    """Check the free space of a directory, or of its nearest existing parent.

    Args:
        reserve_bytes: Free space without which no machine is forked.
    """
    detail = f"{free_bytes / _GIB:.1f} GiB free in {directory}"
    if not writable:
        return _fail(name, f"{directory} is not writable", fix=f"run as its owner, or set {name}")
    if free_bytes < max(_DISK_FAIL_BYTES, reserve_bytes):
        return _fail(name, detail, fix=f"free some space, or set {name}")
    if free_bytes < _DISK_WARN_BYTES:
        return _warn(name, detail, fix=f"free some space, or set {name}")
    return _ok(name, detail)


def check_memory(config: Config, *, available_bytes: int, daemon_pid: int | None) -> Check:
    """Check that the memory lets every pool have all of its machines, by the rule that pools start them by."""
    detail = f"{available_bytes / _GIB:.1f} GiB available"
    if not backend_of(config.hypervisor.uri).capabilities.runs_guests:
        return _ok("memory", f"{detail}; the fake hypervisor's machines take little")
    if daemon_pid is not None:
        # Its machines hold a part of what they need, and it reports a shortage itself.
        return _ok("memory", f"{detail} to what process {daemon_pid} has; see its pools below")
    # One machine is booted for the template of each pool; the others are forked from it.
    wanted_bytes = (config.limits.memory_reserve_mib << 20) + sum(
        booted_bytes(pool) + pool.capacity * forked_bytes(pool) for pool in config.pools.values() or [PoolConfig()]
    )
    users = f"{len(config.pools)} pools" if config.pools else "a pool of one machine"
    detail += f"; {users} may take {wanted_bytes / _GIB:.1f} GiB, limits.memory_reserve_mib included"
    if wanted_bytes > available_bytes:
        return _warn("memory", detail, fix="lower the pools' capacity, or expected_memory_mib if machines stay smaller")
    return _ok("memory", detail)


def check_images(config: Config, *, now: datetime) -> Check:
    """Check that the catalogue is readable and has the pools' images, and that no evaluation ends soon."""
    catalogue = ImageCatalogue(config.cache_dir)
    try:
        names = sorted({image.name for image in catalogue.list()})
    except EnvdError as error:
        return _fail("images", str(error), fix="remove the unreadable image")
    missing = sorted({pool.image for pool in config.pools.values()} - set(names))
    if missing and backend_of(config.hypervisor.uri).capabilities.needs_images:
        return _fail(
            "images",
            f"images of pools are missing: {', '.join(missing)}",
            fix=f"{_build('desktop')} or `envd image import FILE`",
        )
    if not names:
        return _warn("images", "no images", fix=_build("desktop"))
    used = {pool.image for pool in config.pools.values()} or set(names)
    if expiring := _expiring([catalogue.get(name) for name in names if name in used], now=now):
        return _warn("images", "; ".join(expiring), fix=f"build it again with {_build('windows --rebuild')}")
    return _ok("images", ", ".join(names))


def check_firmware(config: Config) -> Check:
    """Check that images that boot by UEFI have a firmware."""
    firmware = find_firmware()
    if firmware is not None:
        return _ok("firmware", f"{firmware.code}")
    if users := _images_with(config, lambda image: image.firmware == Firmware.UEFI.value):
        return _fail("firmware", f"no OVMF, but images boot by UEFI: {users}", fix=_install("ovmf"))
    return _warn("firmware", "no OVMF; images that boot by UEFI need it", fix=_install("ovmf"))


def check_tpm(config: Config) -> Check:
    """Check that machines with a TPM have its emulator."""
    users = _images_with(config, lambda image: image.hardware == Hardware.WINDOWS.value)
    purpose = f"the machines of {users} have a TPM" if users else "machines with `--hardware windows` need it"
    return check_tool(SWTPM, package="swtpm", purpose=purpose, version_of=_first_line_of, needed=bool(users))


def _images_with(config: Config, wanted: Callable[[Image], bool]) -> str:
    """Return the names of the images that need something, of the pools or else of the catalogue."""
    try:
        images = [image for image in ImageCatalogue(config.cache_dir).list() if wanted(image)]
    except EnvdError:
        return ""  # `check_images` reports it.
    used = {pool.image.partition("@")[0] for pool in config.pools.values()}
    return ", ".join(sorted({image.name for image in images if not used or image.name in used}))


def _expiring(images: Iterable[Image], *, now: datetime) -> list[str]:
    """Name the images whose evaluation has ended or ends soon."""
    found = []
    for image in images:
        if image.expire_time is not None and (left_days := (image.expire_time - now).days) < _EVALUATION_WARN_DAYS:
            when = f"ends in {left_days} days" if left_days >= 0 else "has ended"
            found.append(f"the evaluation of Windows in image {image.name} {when} ({image.expire_time:%Y-%m-%d})")
    return found


def check_osworld(config: Config) -> Check:
    """Check that OSWorld's tasks, if registered, can be served. Nothing else needs OSWorld."""
    environment = Environment(config.cache_dir)
    installed = "installed" if environment.is_installed else "not installed"
    tasks = f"tasks in {environment.tasks}" if environment.tasks else "no task files registered"
    if environment.tasks and not environment.is_installed:
        detail = f"{installed}, but {tasks}: their resets fail"
        return _warn("osworld", detail, fix="`envd osworld install`")
    return _ok("osworld", f"{installed}, {tasks}")


def check_sandbox() -> Check:
    """Check the sandbox of judge workers and of OSWorld's code."""
    if problem := sandbox_problem():
        return _warn(
            "sandbox",
            f"cannot be created: {problem}; judges run with limits only, and OSWorld's evaluators do not run",
            fix="run envd as root, or allow user namespaces (kernel.unprivileged_userns_clone=1)",
        )
    limits = shortcoming(find_hierarchy()) or "memory and processors are limited per job"
    return _ok("sandbox", f"judges and OSWorld's evaluators are confined; {limits}")


def check_host_name() -> Check:
    """Check that the lookup of the host's name, which libvirt makes at each start of a machine, is fast."""
    if problem := slow_name():
        return _warn("host_name", problem, fix=NAME_FIX)
    return _ok("host_name", f"{socket.gethostname()} is looked up fast")


def check_security(config: Config, *, now: datetime) -> Check:
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
                return Check(
                    name="security", status=status, detail=detail, fix="replace it; envd reloads it without a restart"
                )
    except ConfigError as error:
        return _fail("security", str(error), fix="see the message and docs/security.md")
    if not found:
        return _ok("security", "neither TLS nor tokens; only clients on this host are served")
    return _ok("security", ", ".join(found))


def check_port(name: str, listen: str, *, daemon_pid: int | None) -> Check:
    """Check that an address is free."""
    if listen.startswith("unix:"):
        return _ok(name, f"{listen}; a start replaces the socket if no process listens on it")
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if daemon_pid is not None:
                return _ok(name, f"{listen} is in use; envd runs as process {daemon_pid}")
            detail = f"{listen}: {error.strerror}"
            return _fail(name, detail, fix=f"set {name} to a free port")
    return _ok(name, f"{listen} is free")


def check_pool(pool: Pool) -> Check:
    """Report the health of a pool of a running daemon."""
    if pool.is_failing:
        health, status = "failing", Status.FAIL
    elif pool.problem:
        health, status = "degraded", Status.WARN
    else:
        health, status = "healthy", Status.OK
    return Check(
        name=f"pool {pool.name}",
        status=status,
        detail=f"{health}, {pool.leased_count} of {pool.capacity} machines leased, {pool.waiting_count} requested"
        f"{f'; {pool.problem}' if pool.problem else ''}",
        fix="fix the problem above; the pool retries automatically" if pool.problem else "",
    )


async def check_daemon(
    config: Config, *, daemon_pid: int | None, tls: Tls | None = None, timeout: timedelta = timedelta(seconds=5)
) -> list[Check]:
    """Check the pools of the daemon that uses this state directory, if one runs.

    Args:
        tls: How to connect; by default only the daemon's own certificate is trusted.
    """
    if daemon_pid is None:
        return [_ok("daemon", f"not running in {config.state_dir}")]
    where, security = f"process {daemon_pid} on {config.listen}", config.security
    if config.listen.endswith(":0"):
        detail = f"{where} chose a free port, which only its output shows; its pools were not checked"
        return [_ok("daemon", detail)]
    if security.client_ca is not None and tls is None:
        detail = f"{where} requires client certificates; give --tls-cert and --tls-key to check its pools"
        return [_ok("daemon", detail)]
    name = ""
    try:
        if security.tls_cert is not None:
            tls = tls or Tls(ca=security.tls_cert)
            name = name_of(security.tls_cert.read_bytes())
        # The token is sent only to a daemon that has tokens: another program may listen on the port.
        access = Access(token=None if security.tokens_file else "", tls=tls)
        retry = RetryPolicy(connect_timeout=timeout)
        connection = Connection(Address(config.listen, f"{name}:443" if name else ""), access=access, retry=retry)
        try:
            found = await connection.call("ListPools", env_pb2.ListPoolsRequest(), timeout)
        finally:
            await connection.aclose()
    except Unauthenticated as error:
        detail = f"{where} responds, but its pools were not checked: {error.args[0]}"
        return [_ok("daemon", f"{detail}; set {TOKEN_VARIABLE} to one of its tokens")]
    except (EnvError, ValueError) as error:
        return [
            _warn(
                "daemon",
                f"{where} does not respond: {error}",
                fix="use the daemon's own --config or --listen; a daemon that is starting responds soon",
            )
        ]
    pools = [read_pool(pool, config.listen) for pool in found.pools]
    return [_ok("daemon", f"{where} responds"), *map(check_pool, pools)]


async def check_kvm(config: Config) -> Check:
    """Run guest code with KVM: the device file alone does not prove that KVM works."""
    if is_oci(config.hypervisor.uri):
        return _ok("kvm", "not used by containers")
    probe = await probe_kvm(timeout_s=_KVM_PROBE_TIMEOUT_S)
    if probe.usable:
        return _ok("kvm", probe.detail)
    required = config.hypervisor.accelerator == "kvm"
    joins_group = "group kvm" in probe.detail
    return Check(
        name="kvm",
        status=Status.FAIL if required else Status.WARN,
        detail=f"{probe.detail}; machines run under TCG, which is slow",
        fix="sudo usermod -aG kvm $USER, and log in again"
        if joins_group
        else "use a host with working virtualisation; only speed is affected",
    )


async def check_libvirt(config: Config) -> Check:
    """Open the hypervisor as the daemon does, but in a temporary state directory."""
    binding = f"libvirt-python {importlib.metadata.version('libvirt-python')}"
    if not backend_of(config.hypervisor.uri).capabilities.runs_guests:
        return _ok("libvirt", f"{binding}; not used by the fake hypervisor")
    if is_oci(config.hypervisor.uri):
        return _ok("libvirt", f"{binding}; not used by containers")
    with tempfile.TemporaryDirectory(prefix="envd-doctor-") as scratch:
        uri = config.hypervisor.uri
        hypervisor_config = HypervisorConfig(uri=backend_of(uri).private_uri(uri), accelerator="tcg")
        scratch_config = config.model_copy(update={"state_dir": Path(scratch), "hypervisor": hypervisor_config})
        try:
            hypervisor = await asyncio.wait_for(open_hypervisor(scratch_config), _OPEN_TIMEOUT_S)
            # The rest names the scratch directory and the accelerator, which the daemon does not use.
            library = hypervisor.description.partition(" at ")[0]
            await hypervisor.close()
        except (EnvdError, TimeoutError) as error:
            return _fail(
                "libvirt",
                f"{uri or 'the embedded driver'} cannot be opened: {error or 'no response'}",
                fix=f"{_install('libvirt-daemon-driver-qemu')}; for qemu:///system, start libvirtd",
            )
    return _ok("libvirt", f"{library}, {binding}; {uri or 'the embedded driver'} can be opened")


async def check_containers(config: Config) -> _Found:
    """Create the namespaces of containers as the daemon does, in a temporary state directory."""
    name, is_used = "containers", is_oci(config.hypervisor.uri)
    uri = config.hypervisor.uri if is_used else "oci:"
    with tempfile.TemporaryDirectory(prefix="envd-doctor-") as scratch:
        # Others may enter it, as a daemon's own: it is the state directory of users without privileges.
        Path(scratch).chmod(0o711)
        scratch_config = config.model_copy(update={"state_dir": Path(scratch), "hypervisor": HypervisorConfig(uri=uri)})
        try:
            hypervisor = await asyncio.wait_for(open_hypervisor(scratch_config), _OPEN_TIMEOUT_S)
            found = hypervisor.description
            await hypervisor.close()
        except (EnvdError, TimeoutError) as error:
            detail = f"cannot be used: {error or 'no response'}"
            if not is_used:
                return _ok(name, f"not used, and {detail}")
            return _fail(name, detail, fix="see the message, and docs/hosts.md for the other backends")
    if not is_used:
        return _ok(name, f"not used; --hypervisor {uri} can be: {found}")
    checks = [_ok(name, found)]
    if "control groups cannot" in found or "no hierarchy" in found:
        checks = [
            _warn(
                name,
                f"{found}; memory has no limit, and signals instead of the freezer pause machines",
                fix="run envd in a systemd unit with Delegate=yes, or as root",
            )
        ]
    elif "without limits of memory" in found:
        checks = [_warn(name, found, fix="run envd in a systemd unit with Delegate=yes, or as root")]
    return [*checks, check_inotify(int(_INOTIFY_INSTANCES.read_text()))]


def check_inotify(instance_count: int) -> Check:
    """Check the host's limit of inotify instances, which the programs of all containers of a user share."""
    desktop_count = instance_count // _INOTIFY_PER_DESKTOP
    detail = f"fs.inotify.max_user_instances={instance_count}: enough for about {desktop_count} desktops in containers"
    if desktop_count >= _MANY_DESKTOPS:
        return _ok("inotify", detail)
    return _warn("inotify", detail, fix=f"`{_as_root('sysctl fs.inotify.max_user_instances=8192')}`")


def check_qemu_user(config: Config) -> Check:
    """Check the user that QEMU runs as: a guest that takes over a QEMU of root controls the host."""
    if not is_embedded(config.hypervisor.uri):
        return _ok("qemu_user", "QEMU is not run by envd's embedded driver")
    memory_dir = config.hypervisor.template_memory_dir
    directories = [config.state_dir, config.template_dir, *([memory_dir] if memory_dir else [])]
    catalogue = ImageCatalogue(config.cache_dir)
    try:
        names = {pool.image for pool in config.pools.values()} or {image.name for image in catalogue.list()}
        access = required_access(directories, [catalogue.disk_image(name) for name in sorted(names)])
    except EnvdError as error:
        return _warn("qemu_user", f"unknown: {error}", fix="see the check of images")
    try:
        chosen = choose_qemu_user(config.hypervisor.qemu_user, access)
    except ConfigError as error:
        return _fail("qemu_user", str(error), fix="see the message and docs/deploy.md")
    if chosen.account is not None:
        return _ok("qemu_user", f"QEMU runs as {chosen.account.name}: {chosen.why}")
    if os.geteuid() != 0:
        return _ok("qemu_user", f"QEMU runs as {chosen.why}")
    return _warn(
        "qemu_user",
        f"QEMU runs as root: {chosen.why}",
        fix="chgrp kvm /dev/kvm; chmod 660 /dev/kvm"
        if chosen.why.endswith("/dev/kvm")
        else "fix the reason above; state_dir and cache_dir can be /var/lib/envd and /var/cache/envd",
    )


def check_directory(name: str, directory: Path, *, reserve_bytes: int = 0) -> Check:
    """Check a directory that exists, or that a start creates; see `check_disk`."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free_bytes, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    return check_disk(name, existing, free_bytes=free_bytes, writable=writable, reserve_bytes=reserve_bytes)


async def examine(config: Config, *, tls: Tls | None = None) -> list[Check]:
    """Run all checks."""
    pid, now, tool = holder(config.state_dir), datetime.now(UTC), _first_line_of
    qemu, img, build = "it runs the machines", "it creates the machines' disks", "`envd image build` needs it"
    reserve_bytes = config.limits.disk_reserve_mib << 20
    checks: dict[str, Callable[[], _Found | Awaitable[_Found]]] = {
        "python": lambda: _ok("python", f"{platform.python_version()}, envd {envd_version()}"),
        "qemu-system-x86_64": lambda: check_qemu_version(
            check_tool(
                "qemu-system-x86_64",
                package="qemu-system-x86",
                purpose=qemu,
                version_of=tool,
                needed=not is_oci(config.hypervisor.uri),
            )
        ),
        "qemu-img": lambda: check_tool("qemu-img", package="qemu-utils", purpose=img, version_of=tool),
        "libvirt": lambda: check_libvirt(config),
        "containers": lambda: check_containers(config),
        "kvm": lambda: check_kvm(config),
        "qemu_user": lambda: check_qemu_user(config),
        "firmware": lambda: check_firmware(config),
        "tpm": lambda: check_tpm(config),
        "mmdebstrap": lambda: check_tool(
            "mmdebstrap", package="mmdebstrap", purpose=build, version_of=tool, needed=False
        ),
        "state_dir": lambda: check_directory("state_dir", config.state_dir, reserve_bytes=reserve_bytes),
        "cache_dir": lambda: check_directory("cache_dir", config.cache_dir),
        "memory": lambda: check_memory(config, available_bytes=read_available_bytes(), daemon_pid=pid),
        "images": lambda: check_images(config, now=now),
        "osworld": lambda: check_osworld(config),
        "sandbox": check_sandbox,
        "host_name": check_host_name,
        "security": lambda: check_security(config, now=now),
        "listen": lambda: check_port("listen", config.listen, daemon_pid=pid),
        "metrics_listen": lambda: check_port("metrics_listen", config.metrics_listen, daemon_pid=pid),
        "daemon": lambda: check_daemon(config, daemon_pid=pid, tls=tls),
    }
    return [found for name, check in checks.items() for found in await _guarded(name, check)]


async def _guarded(name: str, check: Callable[[], _Found | Awaitable[_Found]]) -> Sequence[Check]:
    """Run a check; an exception is a finding."""
    try:
        found = check()
        found = await found if isinstance(found, Awaitable) else found
    except ModuleNotFoundError as error:
        return [
            _fail(name, f"{error.name} is not installed", fix="for real machines: pip install 'envd-trainer[host]'")
        ]
    except OSError as error:
        return [_fail(name, f"the check failed: {error}", fix="correct the file or its rights, or run as its owner")]
    except Exception as error:
        return [_fail(name, f"the check failed: {error!r}", fix="report this as a bug")]
    return [found] if isinstance(found, Check) else found


def _first_line_of(path: str) -> str:
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    return run.stdout.partition("\n")[0].strip()


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


@with_settings("listen", "state_dir", "cache_dir", "hypervisor", "accelerator")
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
        err.print("checking; opening libvirt and probing KVM may take a few seconds")
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
