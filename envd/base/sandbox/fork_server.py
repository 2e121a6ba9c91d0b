"""A process that imports code once and runs each job in a fork of itself: no job leaves anything to a later one.

`ForkServer` is the daemon's side; `serve` and `run_in_child` are for the program that it starts. The program itself
runs no job and reads no job's data. Each job has a stream socket of its own: what a process of one job sends can never
be read as the answer of another. Standard library only.

A job ends with its first process, with its time, or when the daemon closes its socket; all its processes end with it.
The last line on its socket, `{"end": ""}`, comes from outside the job: empty, or what ended it. Lines before it are
untrusted.
"""

import asyncio
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from envd.base.sandbox import cgroup, enclosure
from envd.base.sandbox.enclosure import EnclosureError

#: A program that does not run for so long while it starts is stuck. On a busy host the start itself may take longer.
_STALL_S = 60.0
#: CPU time of a start. The judges' takes 0.1 s with compiled modules, OSWorld's evaluators several seconds.
_START_CPU_S = 120.0
#: A program without jobs ends at once when its control socket is closed.
_EXIT_TIMEOUT_S = 1.0
#: Within it, jobs end whose program was killed.
_LEFTOVER_TIMEOUT_S = 1.0
_MAX_GREETING_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = 1 << 12

#: Runs one job, from outside of it: takes the job's number, socket and control group (None where this user can create
#: none), and returns what ended it, empty for nothing.
Supervise = Callable[[int, socket.socket, cgroup.ControlGroup | None], str]
#: What a program prepared: its greeting, the function that runs a job, and the groups of its jobs.
Prepared = tuple[Mapping[str, object], Supervise, cgroup.JobGroups | None]


class ForkServer:
    """Starts the program when it is first needed, and again when it has ended.

    Args:
        command: The program; it calls `serve`.
        environment: All of its environment variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        #: Held while the fields below change.
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._greeting: Mapping[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """The program's process id; None if it is not running."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> Mapping[str, Any]:
        """Start the program unless it is running; return its greeting. If this call is cancelled, the start is undone.

        Raises:
            SandboxError: It does not start; the message says why.
        """
        async with self._starting:
            if self.pid is None:
                await self._stop()
                try:
                    await self._start()
                except BaseException:
                    await self._stop()
                    raise
            return self._greeting

    async def open_job(self, module: str = "") -> socket.socket:
        """Start a job and return its socket, non-blocking. Closing the socket ends the job.

        Args:
            module: The program imports it first, unless it has. If it cannot, the job starts without it.

        Raises:
            SandboxError: The program does not start.
            OSError: The program has just ended.
        """
        await self.start()
        if self._control is None:
            raise ConnectionError("the fork server has been stopped")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [f"job {module}".encode()], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    async def aclose(self) -> None:
        """Stop the program and all running jobs."""
        async with self._starting:
            await self._stop()
            if self._process is not None:
                # A program that was killed could not remove them, nor one with a killed job. Another start would.
                await asyncio.to_thread(cgroup.remove_leftovers, _LEFTOVER_TIMEOUT_S)
            self._process = None

    async def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs, tempfile.TemporaryFile() as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    cwd="/",
                    env=self._environment,
                    # Ctrl-C in a terminal reaches the whole group; the daemon ends the program itself.
                    start_new_session=True,
                )
            except OSError as error:
                raise EnclosureError(f"{self._command[0]} cannot be started: {error}") from error
            theirs.close()
            try:
                message = await self._first_message(self._control, self._process.pid)
                greeting = json.loads(message or b"{}")
            except (TimeoutError, OSError, ValueError) as error:
                # One that is still preparing would else end by itself: its status would not say that it was ended.
                with suppress(ProcessLookupError):
                    self._process.kill()
                raise EnclosureError(f"{error} ({await self._last_words(log)})") from error
            if not greeting:
                raise EnclosureError(f"it ended ({await self._last_words(log)})")
        if "error" in greeting:
            raise EnclosureError(greeting["error"])
        self._greeting = greeting

    async def _first_message(self, control: socket.socket, pid: int) -> bytes:
        """Return what the program sends first; empty if it ended. Raises: TimeoutError: It is stuck or busy."""
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(control, _MAX_GREETING_BYTES))
        used_s = -1.0
        try:
            while not (await asyncio.wait({reading}, timeout=_STALL_S))[0]:
                before_s, used_s = used_s, _cpu_s(pid)
                if used_s == before_s:
                    raise TimeoutError(f"it did not run for {_STALL_S:g} s")
                if used_s > _START_CPU_S:
                    raise TimeoutError(f"it used {used_s:.0f} s of CPU time")
            return reading.result()
        finally:
            reading.cancel()

    async def _last_words(self, log: IO[bytes]) -> str:
        """Return the exit status, and the last line that the program wrote before it was ready."""
        await self._stop()
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 4096))
        text = log.read().decode(errors="replace").strip()
        return f"status {self._process and self._process.returncode}; {text.rpartition(chr(10))[2] or 'no message'}"

    async def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_TIMEOUT_S):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
            await asyncio.shield(self._process.wait())


def serve(prepare: Callable[[], Prepared], load: Callable[[str], object] = importlib.import_module) -> None:
    """Run jobs from the control socket, which is standard input, until it is closed.

    Args:
        prepare: Imports what all jobs need.
        load: Imports a module that some jobs need.
    """
    enclosure.die_with_parent()
    with socket.socket(fileno=os.dup(0)) as control:
        try:
            greeting, supervise, groups = prepare()
        except BaseException as error:
            control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
            raise
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.close(null)
        control.send(json.dumps(greeting).encode())
        # Jobs share the memory of all objects that exist now, as long as the collector does not write to it.
        gc.freeze()
        jobs = _Jobs(supervise, groups)
        while True:
            jobs.wait(control)
            message, handles, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
            if not message:
                break
            module = message.decode().partition(" ")[2]
            if module and module not in sys.modules:
                # The job says what is wrong with a module that cannot be imported.
                with suppress(Exception):
                    load(module)
                gc.freeze()
            with socket.socket(fileno=handles[0]) as channel:
                jobs.start(channel, control)
    jobs.close()


class _Jobs:
    """The running jobs of a program: their supervisors, which are its children, and their control groups."""

    def __init__(self, supervise: Supervise, groups: cgroup.JobGroups | None) -> None:
        self._supervise = supervise
        self._groups = groups
        #: Each supervisor and its group, by an open handle of the process.
        self._running: dict[int, tuple[int, cgroup.ControlGroup | None]] = {}

    def start(self, channel: socket.socket, control: socket.socket) -> None:
        """Start a job. `control` is closed in the job's processes."""
        try:
            group = self._groups.take() if self._groups else None
        except OSError as error:
            send(channel, {"end": f"its control group: {error}"})
            return
        supervisor = os.fork()
        if supervisor == 0:
            control.close()
            for handle in self._running:
                os.close(handle)
            if self._groups:
                self._groups.unlock()
            _run_supervisor(self._supervise, channel, group)
        self._running[os.pidfd_open(supervisor)] = supervisor, group

    def wait(self, control: socket.socket) -> None:
        """Wait for a message on `control`. Supervisors that end until then are reaped, and their groups free again."""
        poll = select.poll()
        for handle in (control.fileno(), *self._running):
            poll.register(handle, select.POLLIN)
        while True:
            ready = [handle for handle, _ in poll.poll()]
            for handle in self._running.keys() & ready:
                poll.unregister(handle)
                self._end(handle)
            if control.fileno() in ready:
                return

    def close(self) -> None:
        """Wait for the running jobs, and remove all groups."""
        for handle in list(self._running):
            self._end(handle)
        if self._groups:
            self._groups.close()

    def _end(self, handle: int) -> None:
        supervisor, group = self._running.pop(handle)
        os.waitpid(supervisor, 0)
        os.close(handle)
        if self._groups and group:
            self._groups.put_back(group)


def _run_supervisor(supervise: Supervise, channel: socket.socket, group: cgroup.ControlGroup | None) -> NoReturn:
    try:
        enclosure.die_with_parent()
        end = supervise(os.getpid(), channel, group)
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    send(channel, {"end": end})
    os._exit(0)


def run_in_child(
    channel: socket.socket, time_s: float | None, work: Callable[[int], None], *, fork: Callable[[], int] = os.fork
) -> str:
    """Run a job's code in a child, until it ends, its time is up or its socket is closed; return what ended it.

    Call it after `enclosure.separate`: the child is then process 1 of a namespace, and all processes of the job end
    with it. Without a namespace, those of its session do.

    Args:
        work: Takes the `alive` of `enclosure.enclose`. Its exceptions are the job's failure.
        fork: Makes the child.
    """
    # The read end becomes readable (end of file) once this process is gone.
    alive, held = os.pipe()
    runner = fork()
    if runner == 0:
        status = 1
        try:
            os.setsid()
            os.close(held)
            work(alive)
            status = 0
        except BaseException as error:
            send(channel, {"failure": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(status)
    handle = os.pidfd_open(runner)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLRDHUP)
    events = poll.poll(None if time_s is None else time_s * 1000)
    is_over = any(ready == handle for ready, _ in events)
    # Not yet waited for, so that no other process can have its id.
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(runner, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    if not is_over:
        return "its socket was closed" if events else f"exceeded its limit of {time_s:g} s"
    return "" if code == 0 else f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def send(channel: socket.socket, value: Mapping[str, object]) -> None:
    """Send a message as one line of JSON. A closed socket means that the caller has abandoned the job."""
    with suppress(OSError):
        channel.sendall(json.dumps(value, allow_nan=False).encode() + b"\n")


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
