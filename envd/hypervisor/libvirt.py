"""Real machines: QEMU through libvirt, one domain and one directory each.

Works on `qemu:///system` (a libvirtd on the host) and on `qemu:///embed?root=DIR` (libvirt's QEMU driver inside this
process, no daemon). What always holds: a machine's directory exists before its domain and outlives it, and both carry
our owner's mark, so whatever a killed daemon leaves can be found and removed, and nothing else is touched.
"""

import asyncio
import logging
import os
import pwd
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from struct import unpack
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

# Read when the library is loaded. The embedded driver would tell our standard error about every tainted domain;
# its errors reach us as exceptions anyway.
os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", "4:stderr")

import libvirt
import libvirt_qemu
from PIL import Image as PillowImage

from envd.errors import ConfigError, GuestUnresponsive, HypervisorError, MachineLost
from envd.hypervisor.accel import AcceleratorChoice, choose_accelerator
from envd.hypervisor.agent_channel import AgentChannel
from envd.hypervisor.libvirt_xml import (
    FirmwareFiles,
    MachineFiles,
    domain_name,
    domain_xml,
    parse_forwarded_port,
    read_mark,
)
from envd.hypervisor.machine import (
    Accelerator,
    Firmware,
    JsonValue,
    MachineSpec,
    MachineState,
    MachineUsage,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How much later than a broken connection libvirt's event of the domain's end may come.
_LOSS_IS_TOLD_WITHIN_S = 3.0
#: Unix socket paths end at 107 bytes; this is what stands below the state directory at most.
_LONGEST_SOCKET = len("/machines/") + 32 + len("/agent.sock")
_MAX_SOCKET_PATH = 107
#: libvirt adds this to an embedded root for its monitor: lib/domain-N-<20 characters of the name>/monitor.sock
_LONGEST_MONITOR = len("/lib/domain-99999-12345678901234567890/monitor.sock")

_OVMF = (
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
)
#: The embedded driver has no virtlogd beside it, and runs no machine but ours: what libvirt would do to protect other
#: users' machines (cgroups, mount namespaces, relabelling) would only cost start-up time here. seccomp stays on.
_EMBED_CONF = """\
stdio_handler = "file"
security_driver = "none"
seccomp_sandbox = 1
dynamic_ownership = 0
remember_owner = 0
namespaces = []
cgroup_controllers = []
user = "{user}"
group = "{group}"
"""


@lru_cache(maxsize=1)
def _start_event_loop() -> None:
    """Run libvirt's own event loop in a thread, once a process: the embedded driver and domain events need it."""
    libvirt.virEventRegisterDefaultImpl()
    libvirt.registerErrorHandler(lambda _context, _error: None, None)

    def run() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=run, name="libvirt-events", daemon=True).start()


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when the caller is cancelled; the cancellation is delivered afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = cancelled or not task.cancelled()
        except Exception:
            break
    if cancelled:
        # Retrieve the outcome, so that a failure is not reported as never seen.
        if not task.cancelled():
            task.exception()
        raise asyncio.CancelledError
    return task.result()


class LibvirtHypervisor:
    """Machines on this host's QEMU."""

    def __init__(
        self,
        connection: Any,
        *,
        uri: str,
        state_dir: Path,
        owner: str,
        choice: AcceleratorChoice,
        executor: ThreadPoolExecutor,
        tcg_cache_mib: int,
    ) -> None:
        self._connection = connection
        self._uri = uri
        self._owner = owner
        self._choice = choice
        self._executor = executor
        self._tcg_cache_mib = tcg_cache_mib
        self._machines_dir = state_dir / "machines"
        self._machines: dict[str, LibvirtMachine] = {}
        self._loop = asyncio.get_running_loop()
        version = connection.getVersion()
        self._description = (
            f"libvirt {_dotted(libvirt.getVersion())} at {uri}, QEMU {_dotted(version)}, "
            f"accelerator {choice.accelerator.value} ({choice.why})"
        )
        self._event_id = connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_lifecycle, None
        )

    @classmethod
    async def open(
        cls,
        *,
        uri: str = "",
        state_dir: Path,
        accelerator: str = "auto",
        cache_dir: Path | None = None,
        tcg_cache_mib: int = 128,
    ) -> "LibvirtHypervisor":
        """Connect to libvirt.

        Args:
            uri: `qemu:///system` or `qemu:///embed?root=DIR`; empty for an embedded driver below `state_dir`.
            state_dir: Where machines' files lie. Its path must be short: Unix sockets live below it.
            accelerator: `auto`, `kvm` or `tcg`.
            cache_dir: Where what libvirt learns of QEMU is kept between state directories (some 8 s to learn).
            tcg_cache_mib: Bound of each machine's translation cache under TCG.

        Raises:
            ConfigError: The accelerator does not work here, or a path is too long.
            HypervisorError: libvirt refused.
        """
        state_dir = state_dir.resolve()
        uri = uri or f"qemu:///embed?root={state_dir}/libvirt"
        _check_lengths(uri, state_dir)
        (state_dir / "machines").mkdir(parents=True, exist_ok=True)
        owner = _owner_id(state_dir)
        choice = await choose_accelerator(accelerator)
        executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="libvirt")

        def connect() -> Any:
            _start_event_loop()
            _prepare_embedded(uri, cache_dir)
            return libvirt.open(uri)

        try:
            connection = await asyncio.get_running_loop().run_in_executor(executor, connect)
        except libvirt.libvirtError as error:
            executor.shutdown(wait=False)
            raise HypervisorError(f"libvirt cannot open {uri}: {error}") from error
        return cls(
            connection,
            uri=uri,
            state_dir=state_dir,
            owner=owner,
            choice=choice,
            executor=executor,
            tcg_cache_mib=tcg_cache_mib,
        )

    @property
    def accelerator(self) -> Accelerator:
        """How its guests run."""
        return self._choice.accelerator

    @property
    def description(self) -> str:
        """One line for operators."""
        return self._description

    async def create(self, spec: MachineSpec) -> "LibvirtMachine":
        """Make and start a machine; on failure or cancellation nothing is left behind.

        Raises:
            HypervisorError: libvirt, QEMU or qemu-img refused; the message says why.
        """
        making = asyncio.ensure_future(self._create(spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # A thread inside libvirt cannot be stopped, so the machine is finished first and destroyed then.
            await _to_the_end(self._discard(making))
            raise

    @staticmethod
    async def _discard(making: "asyncio.Future[LibvirtMachine]") -> None:
        await asyncio.wait({making})
        if not making.cancelled() and making.exception() is None:
            await making.result().destroy()

    async def _create(self, spec: MachineSpec) -> "LibvirtMachine":
        files = MachineFiles(directory=self._machines_dir / spec.machine_id)
        try:
            files.directory.mkdir()
        except FileExistsError as error:
            raise HypervisorError(f"machine {spec.machine_id} exists already in {files.directory}") from error
        machine = LibvirtMachine(spec, files, hypervisor=self)
        self._machines[domain_name(self._owner, spec.machine_id)] = machine
        try:
            firmware = _prepare_firmware(spec, files)
            await _create_overlay(spec, files)
            xml = domain_xml(
                spec,
                owner=self._owner,
                files=files,
                accelerator=self.accelerator,
                firmware=firmware,
                tcg_cache_mib=self._tcg_cache_mib,
            )
            machine.started(await self.call(self._connection.createXML, xml, 0))
            if spec.image.has_guestd:
                usernet = await self.call(
                    libvirt_qemu.qemuMonitorCommand,
                    machine.domain,
                    "info usernet",
                    libvirt_qemu.VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP,
                )
                machine.set_guestd_port(parse_forwarded_port(usernet))
        except BaseException as error:
            await machine.destroy()
            if isinstance(error, libvirt.libvirtError | OSError):
                raise HypervisorError(f"machine {spec.machine_id} could not be started: {error}") from error
            if isinstance(error, MachineLost):
                raise HypervisorError(f"machine {spec.machine_id} ended as it was started: {error}") from error
            raise
        log.info("machine started", extra={"machine_id": spec.machine_id, "image": spec.image.name})
        return machine

    async def reap(self) -> list[str]:
        """Destroy what earlier daemons with this state directory left; returns the machines' ids."""
        found: set[str] = set()
        live = {machine.spec.machine_id for machine in self._machines.values()}
        for domain in await self.call(self._connection.listAllDomains, 0):
            try:
                mark = read_mark(await self.call(domain.XMLDesc, 0))
            except HypervisorError:
                continue  # It ended between the list and the question.
            if mark is None or mark.owner != self._owner or mark.machine_id in live:
                continue
            await self.call(_destroy_domain, domain)
            found.add(mark.machine_id)
        for pid, machine_id in _stray_processes(self._owner):
            if machine_id not in live:
                # libvirt lost sight of it (its own state was removed): the name on its command line is our mark.
                log.warning("killing a stray QEMU", extra={"machine_id": machine_id, "pid": pid})
                _kill(pid)
                found.add(machine_id)
        for directory in self._machines_dir.iterdir():
            if directory.name not in live:
                await self.call(shutil.rmtree, directory, True)
                found.add(directory.name)
        return sorted(found)

    async def close(self) -> None:
        """Let go of libvirt. Machines must have been destroyed before."""

        def close() -> None:
            self._connection.domainEventDeregisterAny(self._event_id)
            self._connection.close()

        await self.call(close)
        self._executor.shutdown(wait=False)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking libvirt call on the executor. Raises: HypervisorError."""
        try:
            return await self._loop.run_in_executor(self._executor, function, *arguments)
        except libvirt.libvirtError as error:
            raise HypervisorError(str(error)) from error

    def forget(self, machine: "LibvirtMachine") -> None:
        """Stop routing events to a machine that is gone."""
        self._machines.pop(domain_name(self._owner, machine.machine_id), None)

    def _on_lifecycle(self, _connection: Any, domain: Any, event: int, detail: int, _opaque: Any) -> None:
        """libvirt's thread: hand a domain's end to the event loop."""
        if event in {libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_CRASHED}:
            reason = _STOP_REASONS.get(detail, f"detail {detail}")
            try:
                self._loop.call_soon_threadsafe(self._stopped, domain.name(), reason)
            except RuntimeError:
                log.debug("a domain ended after the event loop did")

    def _stopped(self, name: str, reason: str) -> None:
        if machine := self._machines.get(name):
            machine.mark_lost(f"its QEMU ended: {reason}")


_STOP_REASONS = {
    libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: "the guest shut down",
    libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED: "destroyed",
    libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: "crashed",
    libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: "failed",
}


class LibvirtMachine:
    """One QEMU domain. Implements `envd.hypervisor.machine.Machine`."""

    def __init__(self, spec: MachineSpec, files: MachineFiles, *, hypervisor: LibvirtHypervisor) -> None:
        self._spec = spec
        self._files = files
        self._hypervisor = hypervisor
        self._state = MachineState.RUNNING
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self._agent = AgentChannel(files.agent_socket, machine_id=spec.machine_id)
        self._guestd_url: str | None = None
        self._pid: int | None = None
        self._destroying: asyncio.Future[None] | None = None
        self.domain: Any = None

    def __repr__(self) -> str:
        return f"<LibvirtMachine {self.machine_id} {self._state.value} image={self._spec.image.name}>"

    @property
    def machine_id(self) -> str:
        """The id of its spec."""
        return self._spec.machine_id

    @property
    def spec(self) -> MachineSpec:
        """What it was made from."""
        return self._spec

    @property
    def state(self) -> MachineState:
        """Where it is in its life."""
        return self._state

    @property
    def files(self) -> MachineFiles:
        """Where its files lie."""
        return self._files

    @property
    def guestd_url(self) -> str | None:
        """Base URL of the in-guest HTTP service on the host's loopback."""
        return self._guestd_url

    @property
    def lost(self) -> asyncio.Event:
        """Set, once and for ever, when the machine is gone."""
        return self._lost

    @property
    def lost_reason(self) -> str:
        """Why it is gone; empty while it is not."""
        return self._lost_reason

    def started(self, domain: Any) -> None:
        """Take over the domain that libvirt made."""
        self.domain = domain

    def set_guestd_port(self, port: int | None) -> None:
        """Learn which host port leads to guestd. Raises: HypervisorError: none does."""
        if port is None:
            raise HypervisorError(f"machine {self.machine_id}: QEMU forwards no port to guestd")
        self._guestd_url = f"http://127.0.0.1:{port}"

    def mark_lost(self, reason: str) -> None:
        """Learn that the machine is gone. The first reason stays."""
        if not self._lost.is_set():
            self._lost_reason = reason
            self._state = MachineState.GONE
            self._lost.set()

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to its RFB 3.8 server. Raises: MachineLost."""
        self._require_alive()
        try:
            return await asyncio.open_unix_connection(str(self._files.display_socket), limit=1 << 20)
        except OSError as error:
            raise MachineLost(f"machine {self.machine_id}: its display cannot be reached: {error}") from error

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Run one QEMU guest agent command. Raises: GuestUnresponsive, GuestError, MachineLost."""
        try:
            return await self._unless_lost(self._agent.command(command, arguments, timeout_s=timeout_s))
        except GuestUnresponsive as error:
            # A time-out is an OSError too, but says nothing of QEMU.
            if isinstance(error.__cause__, OSError | EOFError) and not isinstance(error.__cause__, TimeoutError):
                # Only a QEMU that ends closes this socket; libvirt tells of it a moment later.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), _LOSS_IS_TOLD_WITHIN_S)
                self._require_alive(error)
            raise

    async def screendump(self) -> bytes:
        """Return the true screen as PNG, straight from the display device. Raises: MachineLost."""
        return await self._domain_call(self._screenshot)

    def _screenshot(self) -> bytes:
        stream = self.domain.connect().newStream(0)
        picture = BytesIO()
        self.domain.screenshot(stream, 0, 0)
        stream.recvAll(lambda _stream, data, sink: sink.write(data), picture)
        stream.finish()
        png = BytesIO()
        with PillowImage.open(picture) as image:
            image.convert("RGB").save(png, "PNG", compress_level=1)
        return png.getvalue()

    async def pause(self) -> None:
        """Stop the guest between two instructions. Raises: MachineLost."""
        await self._set_running(running=False)

    async def resume(self) -> None:
        """Let the guest run on. Raises: MachineLost."""
        await self._set_running(running=True)

    async def _set_running(self, *, running: bool) -> None:
        wanted = MachineState.RUNNING if running else MachineState.PAUSED
        self._require_alive()
        if self._state is not wanted:
            await self._domain_call(self.domain.resume if running else self.domain.suspend)
            if self._state is not MachineState.GONE:
                self._state = wanted

    async def usage(self) -> MachineUsage:
        """Measure what it costs now. Raises: MachineLost."""
        return await self._domain_call(self._measure)

    def _measure(self) -> MachineUsage:
        if self._pid is None:
            self._pid = _peer_pid(self._files.display_socket, self.machine_id)
        fields = _smaps_rollup(self._pid)
        overlay = self._files.overlay.stat()
        return MachineUsage(
            rss_bytes=fields["Rss"], private_dirty_bytes=fields["Private_Dirty"], overlay_bytes=overlay.st_blocks * 512
        )

    async def destroy(self) -> None:
        """End it and remove its overlay, sockets and directory. Idempotent; runs to its end when cancelled."""
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await _to_the_end(self._wait_destroyed(self._destroying))

    @staticmethod
    async def _wait_destroyed(destroying: "asyncio.Future[None]") -> None:
        await asyncio.shield(destroying)

    async def _destroy(self) -> None:
        self.mark_lost("destroyed by envd")
        await self._agent.close()
        if self.domain is not None:
            await self._hypervisor.call(_destroy_domain, self.domain)
        await self._hypervisor.call(shutil.rmtree, self._files.directory, True)
        self._hypervisor.forget(self)

    async def _domain_call(self, function: Callable[[], T]) -> T:
        """Run a blocking call on the domain; a failure because it just ended is a lost machine."""
        self._require_alive()
        try:
            return await self._unless_lost(self._hypervisor.call(function))
        except (HypervisorError, OSError) as error:
            if not self._lost.is_set() and not await self._hypervisor.call(_is_active, self.domain):
                self.mark_lost("its QEMU ended")
            self._require_alive(error)
            if isinstance(error, OSError):
                raise HypervisorError(f"machine {self.machine_id}: {error}") from error
            raise

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or raise `MachineLost` the moment that the machine is gone."""
        task = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._require_alive()
            try:
                return task.result()
            except Exception as error:
                self._require_alive(error)
                raise
        finally:
            lost.cancel()
            if not task.done():
                task.cancel()

    def _require_alive(self, cause: BaseException | None = None) -> None:
        if self._lost.is_set():
            raise MachineLost(f"machine {self.machine_id} is gone: {self._lost_reason}") from cause


def _dotted(version: int) -> str:
    """libvirt's packed version numbers: 1,000,000 * major + 1,000 * minor + release."""
    return f"{version // 1_000_000}.{version // 1_000 % 1_000}.{version % 1_000}"


def _check_lengths(uri: str, state_dir: Path) -> None:
    longest = len(os.fsencode(state_dir)) + _LONGEST_SOCKET
    roots = parse_qs(urlsplit(uri).query).get("root", [])
    longest = max([longest, *(len(os.fsencode(root)) + _LONGEST_MONITOR for root in roots)])
    if longest > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"state directory {state_dir}: sockets below it would have paths of up to {longest} bytes, and the "
            f"system's limit is {_MAX_SOCKET_PATH}; choose a shorter --state-dir"
        )


def _owner_id(state_dir: Path) -> str:
    """Return the state directory's own id, made at its first use."""
    path = state_dir / "owner"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        owner = secrets.token_hex(4)
        path.write_text(owner + "\n")
        return owner


def _prepare_embedded(uri: str, cache_dir: Path | None) -> None:
    """Write the embedded driver's configuration, and lend it the cache of what it learnt of QEMU before."""
    parts = urlsplit(uri)
    roots = parse_qs(parts.query).get("root", [])
    if parts.path != "/embed" or not roots:
        return
    root = Path(roots[0])
    (root / "etc").mkdir(parents=True, exist_ok=True)
    account = pwd.getpwuid(os.geteuid())
    group = str(os.getegid())
    (root / "etc" / "qemu.conf").write_text(_EMBED_CONF.format(user=account.pw_name, group=f"+{group}"))
    cache = root / "cache"
    if cache_dir is not None and not cache.exists():
        shared = cache_dir / "libvirt"
        shared.mkdir(parents=True, exist_ok=True)
        cache.symlink_to(shared)


def _prepare_firmware(spec: MachineSpec, files: MachineFiles) -> FirmwareFiles | None:
    """Give a UEFI machine its own variables. Raises: HypervisorError: the host has no OVMF."""
    if spec.image.firmware is not Firmware.UEFI:
        return None
    for code, variables in _OVMF:
        if Path(code).exists() and Path(variables).exists():
            shutil.copyfile(variables, files.firmware_vars)
            return FirmwareFiles(code=Path(code), vars_template=Path(variables))
    raise HypervisorError(f"image {spec.image.name} boots by UEFI and this host has no OVMF; install the package ovmf")


async def _create_overlay(spec: MachineSpec, files: MachineFiles) -> None:
    process = await asyncio.create_subprocess_exec(
        *("qemu-img", "create", "-q", "-f", "qcow2"),
        *("-b", str(spec.image.disk), "-F", spec.image.disk_format, str(files.overlay)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    if process.returncode != 0:
        message = stderr.decode(errors="replace").strip()
        raise HypervisorError(f"machine {spec.machine_id}: its overlay could not be made: {message}")


def _destroy_domain(domain: Any) -> None:
    """End a domain; one already gone is a success."""
    try:
        domain.destroy()
    except libvirt.libvirtError as error:
        if error.get_error_code() not in {libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID}:
            raise


def _is_active(domain: Any) -> bool:
    try:
        return bool(domain.isActive())
    except libvirt.libvirtError:
        return False


def _peer_pid(socket_path: Path, machine_id: str) -> int:
    """Return the process that made a listening socket, as the kernel vouches for it."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(socket_path))
        pid, _uid, _gid = unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0:
        raise HypervisorError(f"machine {machine_id}: the process behind {socket_path} is not visible")
    return int(pid)


def _smaps_rollup(pid: int) -> dict[str, int]:
    """Return a process's memory by kind, in bytes (proc(5), smaps_rollup)."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields


def _stray_processes(owner: str) -> list[tuple[int, str]]:
    """Return (pid, machine id) of QEMU processes that carry the owner's mark in their name argument."""
    prefix = f"guest=envd-{owner}-".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for argument in arguments:
            if argument.startswith(prefix):
                found.append((int(entry.name), argument.removeprefix(prefix).partition(b",")[0].decode()))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        log.debug("process %d was gone already", pid)
