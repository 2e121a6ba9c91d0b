"""One container as a `Machine`: channels, run state, memory, loss and destruction."""

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import JsonValue

from envd.base.aio import race, shielded
from envd.base.errors import EnvdError, GuestUnresponsive, HypervisorError, MachineLost
from envd.base.losses import FULL_DISK_BYTES, Loss, LossOwner, Silence, loss_by_silence
from envd.hypervisor import guest_socket
from envd.hypervisor.agent_channel import AgentChannel
from envd.hypervisor.machine import MachineSpec, MachineState, MachineUsage
from envd.hypervisor.oci.control_groups import MachineGroups
from envd.hypervisor.oci.relay import Relay
from envd.hypervisor.oci.stopping import ProcessTree
from envd.hypervisor.oci.templates import OciSnapshot

T = TypeVar("T")

#: Reason of the loss of a machine that was not needed any more.
DESTROYED: Final = "destroyed by envd"
#: The end of a container's first process is reported at most this much later than the end of its sockets.
_LOSS_EVENT_TIMEOUT_S = 3.0
_PING_TIMEOUT_S = 15.0
#: Size at which the log of a container's console is emptied, and how much of its end is shown.
_MAX_LOG_BYTES, _TAIL_BYTES, _TAIL_LINES = 1 << 20, 1000, 5
#: A new session has used no processor for this long when it waits for input.
_IDLE_S, _IDLE_SHARE, _POLL_S = 0.12, 0.15, 0.02
_START_TIMEOUT_S = 120.0
#: Its owner names its quota for the first time at most this much later; it checks every 2 s.
_QUOTA_TIMEOUT_S = 4.0
#: Causes by the signal that the first process of a process id namespace ends with after reboot(2).
_SHUTDOWNS: Final[Mapping[int, str]] = {signal.SIGINT: "POWER_OFF", signal.SIGHUP: "REBOOT"}
#: Programs that start with the session and are slow on a busy host may keep it busy for longer than is worth waiting.
_MAX_IDLE_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFiles:
    """Paths of one machine's files on the host."""

    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "config.json"

    @property
    def envd(self) -> Path:
        """What the container has as /envd."""
        return self.directory / "envd"

    @property
    def display_socket(self) -> Path:
        return self.envd / "vnc.sock"

    @property
    def agent_socket(self) -> Path:
        return self.envd / "agent.sock"

    @property
    def guestd_socket(self) -> Path:
        return self.envd / "guestd.sock"

    @property
    def console_log(self) -> Path:
        return self.envd / "console.log"

    @property
    def used_mark(self) -> Path:
        """A file that exists from the moment in which it may be used: its session then does not start again."""
        return self.envd / "used"


class OciMachine:
    """A machine of `OciHypervisor`."""

    def __init__(
        self,
        spec: MachineSpec,
        files: MachineFiles,
        *,
        root_uid: int,
        template: OciSnapshot | None,
        measure_disk: Callable[[], Awaitable[int]],
        remove: "Callable[[OciMachine], Awaitable[None]]",
    ) -> None:
        """Describe a machine that is about to be made.

        Args:
            template: Template that it starts from, for which it then waits to be loaded; None if it boots.
            measure_disk: Returns how many bytes of the host's disk its files use.
            remove: Ends its processes and removes its files.
        """
        self.spec = spec
        self.machine_id = spec.machine_id
        self.files = files
        self.template = template
        self.groups: MachineGroups | None = None
        """Its control groups; None if the host has none for it, or not yet."""
        self._root_uid = root_uid
        self.state = MachineState.RUNNING
        self.is_loaded = template is None
        """Whether it may run."""
        self.lost = asyncio.Event()
        self.loss: Loss | None = None
        self.guestd_url: str | None = None
        self.pid: int | None = None
        """Its first process, by its number in the containers' namespace."""
        self._agent = AgentChannel(files.agent_socket, machine_id=spec.machine_id)
        self._relay = Relay(files.guestd_socket)
        self._measure_disk = measure_disk
        self._remove = remove
        self._tree: ProcessTree | None = None
        self._quota_check: asyncio.Task[None] | None = None
        self._quota_bytes = 0
        self._is_quota_checked = True
        """Whether the disk was measured after the quota was last asked for."""
        self._destroying: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<OciMachine {self.machine_id} {self.state.value} image={self.spec.image.name}>"

    async def open(self) -> None:
        """Open the port that leads to guestd. Raises: OSError."""
        self.guestd_url = f"http://127.0.0.1:{await self._relay.open()}"

    async def wait_started(self) -> None:
        """Return when the session is up and waits for input. Raises: MachineLost, HypervisorError."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._unless_lost(self._wait_session())
        except TimeoutError as error:
            raise HypervisorError(
                f"machine {self.machine_id}: its session was not up after {_START_TIMEOUT_S:g} s; its console ended"
                f" with: {self.console_tail() or 'nothing'}"
            ) from error

    async def _wait_session(self) -> None:
        while not await self._is_session_ready():  # noqa: ASYNC110 -- another process decides
            await asyncio.sleep(_POLL_S)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while loop.time() - began_s < _MAX_IDLE_WAIT_S:
            before_s = self.processor_s()
            await asyncio.sleep(_IDLE_S)
            after_s = self.processor_s()
            if before_s is None or after_s is None or after_s - before_s < _IDLE_SHARE * _IDLE_S:
                return

    async def _is_session_ready(self) -> bool:
        """Ask guestd whether the desktop is up."""
        try:
            reader, writer = await guest_socket.connect(self.files.guestd_socket)
        except OSError:
            return False
        try:
            writer.write(b"GET /envd/session HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")
            head, _, body = (await reader.read(1 << 16)).partition(b"\r\n\r\n")
            return head.startswith(b"HTTP/1.1 200") and json.loads(body).get("ready") is True
        except (OSError, ValueError, AttributeError):
            return False
        finally:
            writer.close()

    def mark_used(self) -> None:
        """Let it run. Raises: HypervisorError: the disk is full."""
        try:
            os.close(
                os.open(
                    self.files.used_mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
                )
            )
        except OSError as error:
            raise HypervisorError(f"machine {self.machine_id}: {error}") from error
        self.is_loaded = True

    # Loss

    @property
    def lost_reason(self) -> str:
        return self.loss.reason if self.loss else ""

    def mark_lost(self, reason: str) -> None:
        """Record that the host ended the machine. Only the first reason is kept."""
        self._end_by(Loss(LossOwner.HOST, reason))

    def report_exit(self, status: int) -> None:
        """Record the end of its first process: its exit code, or a signal's negative number.

        Processes of the container cannot kill it (pid_namespaces(7)), so SIGKILL is the host's, unless the kernel sent
        it because the container's memory was full.
        """
        self._end_by(
            _loss_by_exit(status, is_out_of_memory=self.groups is not None and self.groups.ran_out_of_memory())
        )

    def _end_by(self, loss: Loss) -> None:
        if not self.lost.is_set():
            self.loss = self._naming_full_disk(loss)
            self.state = MachineState.GONE
            self.lost.set()
            self._relay.close()

    def _naming_full_disk(self, loss: Loss) -> Loss:
        free_bytes = self._free_bytes()
        if loss.owner is LossOwner.GUEST or free_bytes is None or free_bytes >= FULL_DISK_BYTES:
            return loss
        return Loss(LossOwner.HOST, f"{loss.reason}; the host's disk of {self.files.directory} is full, remove files")

    def _free_bytes(self) -> int | None:
        try:
            status = os.statvfs(self.files.directory.parent)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize

    @property
    def reacts_before_answer(self) -> bool:
        """See `GuestChannels`."""
        return self.groups is not None and self.groups.is_unified and self._counts_waits

    @cached_property
    def _counts_waits(self) -> bool:
        return self.groups is not None and self.groups.counts_waits

    def processor_s(self) -> float | None:
        """Return the seconds in which the guest used a processor or waited for one, or for a disk. Never raises."""
        times = self._processor_times()
        if times is None or self.groups is None:
            return None if times is None else sum(times)
        return sum(times) + self.groups.waited_for_disk_s()

    def _processor_times(self) -> tuple[float, float] | None:
        try:
            return self._process_tree().processor_s() if self.groups is None else self.groups.processor_s()
        except (OSError, ValueError, IndexError):
            return None

    async def examine(self) -> Loss:
        with suppress(TimeoutError):  # an end that is about to be reported
            await asyncio.wait_for(self.lost.wait(), _LOSS_EVENT_TIMEOUT_S)
        if self.loss is None and self._is_disk_full():
            await self._end_by_full_disk()
        if self.loss is not None:
            return self.loss
        loss = self._naming_full_disk(loss_by_silence(await self._observe_silence()))
        # The X server is a process of the container, which ends or starves as the others do.
        return replace(loss, explains_display=True)

    def _all_processor_times(self) -> tuple[float, float]:
        """Return `_processor_times` with the waits of each thread where the kernel does not measure those of groups."""
        used_s, waited_s = self._processor_times() or (0.0, 0.0)
        if self.groups is not None and not self._counts_waits:
            with suppress(OSError):
                waited_s = self.groups.run_delay_s()
        return used_s, waited_s

    async def _observe_silence(self) -> Silence:
        before = self._all_processor_times()
        answers = False
        with suppress(EnvdError):
            await self.agent_command("guest-ping", timeout_s=_PING_TIMEOUT_S)
            answers = True
        after = self._all_processor_times()
        return Silence(
            run_state="stopped by the host" if self._is_stopped_by_host() else self.state.value,
            agent_answers=answers,
            used_s=after[0] - before[0],
            waited_s=after[1] - before[1],
            free_disk_bytes=self._free_bytes(),
        )

    def _is_stopped_by_host(self) -> bool:
        """Return whether its first process is stopped, or all are frozen, which nothing in the container can do."""
        if self.state is not MachineState.RUNNING:
            return False
        try:
            is_frozen = self.groups is not None and self.groups.is_frozen()
            return is_frozen or self._process_tree().is_first_stopped()
        except (OSError, IndexError):
            return False

    # Channels

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to its RFB 3.8 server. Raises: MachineLost."""
        self._require_alive()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _LOSS_EVENT_TIMEOUT_S
        while True:
            try:
                return await guest_socket.connect(self.files.display_socket, limit=1 << 20)
            except OSError as error:
                # A container that has just been made has no X server yet, and one whose session failed starts another.
                if loop.time() > deadline_s:
                    raise MachineLost(f"machine {self.machine_id}: its display cannot be reached: {error}") from error
            await race(self.lost, timeout_s=_POLL_S)
            self._require_alive()

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Run one QEMU guest agent command. Raises: GuestUnresponsive, GuestError, MachineLost."""
        try:
            return await self._unless_lost(self._agent.command(command, arguments, timeout_s=timeout_s))
        except GuestUnresponsive as error:
            if isinstance(error.__cause__, OSError | EOFError) and not isinstance(error.__cause__, TimeoutError):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.lost.wait(), min(timeout_s, 0.2))
                self._require_alive()
            raise

    # Running

    async def pause(self) -> None:
        """Stop all processes but the X server. Raises: MachineLost, HypervisorError."""
        self._require_alive()
        if self.state is MachineState.PAUSED:
            return
        try:
            if self.groups is not None:
                await self.groups.freeze()
            else:
                await asyncio.to_thread(self._process_tree().stop)
        except OSError as error:
            self._require_alive()
            raise HypervisorError(f"machine {self.machine_id}: could not be paused: {error}") from error
        if self._is_disk_full():
            await self._end_by_full_disk()
        self._require_alive()
        self.state = MachineState.PAUSED

    def _is_disk_full(self) -> bool:
        free_bytes = self._free_bytes()
        return free_bytes is not None and free_bytes < FULL_DISK_BYTES

    async def _end_by_full_disk(self) -> None:
        """Declare it lost, because its programs get errors and continue: by its guest if that is over its quota."""
        deadline_s = time.monotonic() + _QUOTA_TIMEOUT_S
        while not self._quota_bytes and time.monotonic() < deadline_s:  # noqa: ASYNC110 -- its owner's next check
            await asyncio.sleep(_POLL_S)
        if self._quota_bytes:
            self.enforce_disk_quota(self._quota_bytes)
            if self._quota_check is not None:
                await shielded(self._quota_check)
        self.mark_lost("its programs cannot write")

    async def resume(self) -> None:
        """Let its processes run. Raises: MachineLost, HypervisorError."""
        self._require_alive()
        if self.state is MachineState.RUNNING:
            return
        if not self.is_loaded:
            raise HypervisorError(f"machine {self.machine_id}: no state yet; load one first")
        self.thaw()
        self.state = MachineState.RUNNING

    def thaw(self) -> None:
        try:
            if self.groups is not None:
                self.groups.thaw()
            else:
                self._process_tree().resume()
        except OSError as error:
            self._require_alive()
            raise HypervisorError(f"machine {self.machine_id}: could not be resumed: {error}") from error

    def _process_tree(self) -> ProcessTree:
        if self._tree is None:
            self._tree = ProcessTree.of(self.pid or 0, machine_id=self.machine_id, root_uid=self._root_uid)
        return self._tree

    async def usage(self) -> MachineUsage:
        """Measure its memory. Raises: MachineLost, HypervisorError."""
        self._require_alive()
        try:
            return await self._unless_lost(asyncio.to_thread(self._measure))
        except OSError as error:
            raise HypervisorError(f"machine {self.machine_id}: {error}") from error

    def _measure(self) -> MachineUsage:
        pids = self._process_tree().process_ids() if self.groups is None else self.groups.process_ids()
        pss_bytes = dirty_bytes = 0
        for pid in pids:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            except (FileNotFoundError, ProcessLookupError):
                continue
            kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            pss_bytes += kib["Pss"] << 10
            dirty_bytes += kib["Private_Dirty"] << 10
        return MachineUsage(pss_bytes=pss_bytes, private_dirty_bytes=dirty_bytes)

    def console_tail(self) -> str:
        try:
            with os.fdopen(self._open_log(os.O_RDONLY), "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        lines = text.splitlines()[-_TAIL_LINES:]
        return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)

    def _open_log(self, flags: int) -> int:
        """Open the console's log, which the container's root may have replaced. Raises: OSError."""
        handle = os.open(self.files.console_log, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(f"{self.files.console_log} is not a file")
        return handle

    def enforce_disk_quota(self, quota_bytes: int) -> None:
        """Declare it lost if its files use more than `quota_bytes` of disk; keep its console's log small."""
        with suppress(OSError):
            handle = self._open_log(os.O_RDWR)
            if os.fstat(handle).st_size > _MAX_LOG_BYTES:
                os.ftruncate(handle, 0)
            os.close(handle)
        self._quota_bytes = quota_bytes
        self._is_quota_checked = False
        if self._quota_check is None or self._quota_check.done():
            self._quota_check = asyncio.create_task(self._check_quota(), name=f"quota:{self.machine_id}")

    async def _check_quota(self) -> None:
        used_bytes = 0
        while not self._is_quota_checked:
            self._is_quota_checked = True
            try:
                used_bytes = await self._measure_disk()
            except HypervisorError:
                return
        quota_bytes = self._quota_bytes
        if used_bytes > quota_bytes:
            reason = f"it used {used_bytes >> 20} MiB of disk, over its quota of {quota_bytes >> 20} MiB"
            self._end_by(Loss(LossOwner.GUEST, reason, "DISK_FULL"))

    # The end

    async def destroy(self) -> None:
        """End its processes and remove its files. Idempotent; not interrupted by cancellation."""
        if self._destroying is None or _has_failed(self._destroying):
            self._destroying = asyncio.create_task(self._destroy(), name=f"destroy:{self.machine_id}")
        await shielded(self._destroying)

    async def _destroy(self) -> None:
        self._end_by(Loss(LossOwner.HOST, DESTROYED))
        self._relay.close()
        if self._quota_check is not None:
            await asyncio.gather(self._quota_check, return_exceptions=True)
        await self._agent.close()
        await self._remove(self)

    def _require_alive(self) -> None:
        if self.lost.is_set():
            raise MachineLost(f"machine {self.machine_id} is gone: {self.lost_reason}")

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises: MachineLost as soon as the machine is lost."""
        task = asyncio.ensure_future(work)
        try:
            if not self.lost.is_set():
                await race(self.lost, task)
            if task.done():
                return task.result()
            self._require_alive()
            raise AssertionError("neither lost nor done")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _loss_by_exit(status: int, *, is_out_of_memory: bool) -> Loss:
    if status >= 0:
        return Loss(LossOwner.GUEST, f"its first process ended with exit code {status}", "POWER_OFF")
    if -status in _SHUTDOWNS:
        return Loss(LossOwner.GUEST, "its root shut it down", _SHUTDOWNS[-status])
    if status != -signal.SIGKILL:
        return Loss(LossOwner.GUEST, f"its first process ended by {signal.Signals(-status).name}", "PANIC")
    if is_out_of_memory:
        return Loss(LossOwner.GUEST, "its memory was full, and the kernel ended its first process", "PANIC")
    return Loss(LossOwner.HOST, "its first process was killed by the host")
