"""Client of one machine's QEMU guest agent: commands as root, files as bytes, the clock. Needs no network.

The agent serves one command at a time and has no timeouts, so every call here has a deadline. An error of the agent
raises `GuestError`; a missing response raises `GuestUnresponsive`. `renew_identity` makes a fork a machine of its own.
"""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import UUID, uuid5

from pydantic import JsonValue

from cuaenv.results import CommandResult
from envd.base import untrusted_json
from envd.base.channels import GuestChannels
from envd.base.clock import running_timeout
from envd.base.errors import GuestError, GuestUnresponsive, TooLarge

# libvirt accepts agent messages of a few MiB; base64 adds a third.
_CHUNK_BYTES = 1 << 20
_FIRST_POLL_S = 0.01
_LAST_POLL_S = 0.5
#: For cleanup after the deadline of a call.
_CLEANUP_TIMEOUT_S = 2.0
_MAX_QUOTED_CHARS = 200
_CLOCK_TOLERANCE_NS = 5_000_000_000
#: Namespace of the guests' machine ids (machine-id(5)).
_MACHINE_IDS = UUID("6f2d1e5c-0d4b-4b0e-9a57-0e5d5c1d2a02")
_SEED_BYTES = 64
_WAKE_TIMEOUT_S = 30.0


@asynccontextmanager
async def _within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Limit the time of the block. Raises: GuestUnresponsive: It took longer."""
    try:
        async with running_timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise GuestUnresponsive(f"{what}: not done within {timeout_s:g} s") from error


class GuestAgent:
    """The guest agent of one machine.

    Methods raise `GuestUnresponsive` if it does not answer in time, `GuestError` if it reports an error, and
    `MachineLost`.
    """

    def __init__(self, channels: GuestChannels) -> None:
        self._channels = channels

    async def ping(self, *, timeout_s: float = 5.0) -> None:
        """Return once the agent answers. Raises: GuestUnresponsive."""
        await self._channels.agent_command("guest-ping", timeout_s=timeout_s)

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command to its end as the agent's user (root); `env`, if given, replaces its environment.

        Raises:
            GuestError: It could not be started, or its output exceeds the agent's limit (16 MiB).
            GuestUnresponsive: It did not end within `timeout_s`; it was killed, if the guest has /bin/kill.
        """
        arguments: dict[str, JsonValue] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if stdin:
            arguments["input-data"] = base64.b64encode(stdin).decode()
        if env is not None:
            arguments["env"] = [f"{name}={value}" for name, value in env.items()]
        command, pid, poll_s = self._command, None, _FIRST_POLL_S
        try:
            async with _within(timeout_s, f"{argv[0]} on {self._channels.machine_id}"):
                started = _fields(await command("guest-exec", arguments, timeout_s), "guest-exec")
                pid = _number(started, "pid", "guest-exec")
                while True:
                    answer = await command("guest-exec-status", {"pid": pid}, timeout_s)
                    status = _fields(answer, "guest-exec-status")
                    if status.get("exited"):
                        return await _result(status, argv[0])
                    await asyncio.sleep(poll_s)
                    poll_s = min(poll_s * 1.5, _LAST_POLL_S)
        except GuestUnresponsive:
            if pid is not None:
                kill: dict[str, JsonValue] = {"path": "/bin/kill", "arg": ["-KILL", str(pid)]}
                with suppress(GuestError, GuestUnresponsive):
                    await command("guest-exec", kill, _CLEANUP_TIMEOUT_S)
            raise

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20, timeout_s: float = 60.0) -> bytes | None:
        """Return a file's bytes; None if it does not exist.

        Raises:
            GuestError: It is larger than `max_bytes`, or cannot be read.
        """
        async with _within(timeout_s, f"reading {path} on {self._channels.machine_id}"):
            try:
                handle = await self._open(path, "r", timeout_s)
            except GuestError as error:
                if _means_absent(str(error)):
                    return None
                raise
            content = bytearray()
            try:
                while True:
                    count = min(_CHUNK_BYTES, max_bytes + 1 - len(content))
                    response = _fields(
                        await self._command("guest-file-read", {"handle": handle, "count": count}, timeout_s),
                        "guest-file-read",
                    )
                    content += await _bytes(response, "buf-b64", "guest-file-read")
                    if len(content) > max_bytes:
                        raise GuestError(f"{path} on {self._channels.machine_id} is larger than {max_bytes} bytes")
                    if response.get("eof") or not response.get("count"):
                        return bytes(content)
            finally:
                await self._close(handle)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 60.0) -> None:
        """Write a file as the agent's user; its directory must exist. On failure the file may be half written."""
        async with _within(timeout_s, f"writing {path} on {self._channels.machine_id}"):
            handle = await self._open(path, "w", timeout_s)
            try:
                at = 0
                while at < len(data):
                    chunk = base64.b64encode(data[at : at + _CHUNK_BYTES]).decode()
                    response = _fields(
                        await self._command("guest-file-write", {"handle": handle, "buf-b64": chunk}, timeout_s),
                        "guest-file-write",
                    )
                    written = _number(response, "count", "guest-file-write")
                    if written <= 0:
                        raise GuestError(f"{path} on {self._channels.machine_id} accepts no more data after {at} bytes")
                    at += written
                await self._command("guest-file-flush", {"handle": handle}, timeout_s)
            finally:
                await self._close(handle)

    async def set_time(self, unix_ns: int, *, timeout_s: float = 10.0) -> None:
        """Set the guest's clock, in nanoseconds since 1970 UTC.

        Raises:
            GuestError: The agent returned an error, and the clock is not within 5 s of that time.
        """
        try:
            await self._command("guest-set-time", {"time": unix_ns}, timeout_s)
        except GuestError:
            # The agent sets the system clock, then runs hwclock, which small guests lack: check the clock.
            if not await self.shows_time(unix_ns, timeout_s=timeout_s):
                raise

    async def shows_time(self, unix_ns: int, *, timeout_s: float) -> bool:
        """Return whether the guest's clock is within 5 s of a time, in nanoseconds since 1970 UTC."""
        now_ns = await self._command("guest-get-time", None, timeout_s)
        return isinstance(now_ns, int) and abs(now_ns - unix_ns) <= _CLOCK_TOLERANCE_NS

    async def _command(self, command: str, arguments: Mapping[str, JsonValue] | None, timeout_s: float) -> JsonValue:
        return await self._channels.agent_command(command, arguments, timeout_s=timeout_s)

    async def _open(self, path: str, mode: str, timeout_s: float) -> int:
        handle = await self._command("guest-file-open", {"path": path, "mode": mode}, timeout_s)
        if not isinstance(handle, int):
            raise GuestError(f"guest-file-open: {_quoted(handle)} is not a handle")
        return handle

    async def _close(self, handle: int) -> None:
        # A handle that cannot be closed ends with the agent.
        with suppress(GuestError, GuestUnresponsive):
            await self._channels.agent_command("guest-file-close", {"handle": handle}, timeout_s=_CLEANUP_TIMEOUT_S)


async def _result(status: Mapping[str, JsonValue], name: str) -> CommandResult:
    """Return the result of an exited command. Raises: GuestError: the agent truncated its output."""
    if status.get("out-truncated") or status.get("err-truncated"):
        raise TooLarge(f"{name}: its output exceeds the guest agent's limit; write it to a file and read that")
    signal = status.get("signal")
    exit_code = 128 + signal if isinstance(signal, int) else _number(status, "exitcode", "guest-exec-status")
    return CommandResult(
        exit_code=exit_code,
        stdout=await _bytes(status, "out-data", "guest-exec-status"),
        stderr=await _bytes(status, "err-data", "guest-exec-status"),
    )


def _means_absent(message: str) -> bool:
    """Return whether an error of opening means that the file does not exist, on Linux or Windows."""
    # libvirt's own errors contain such words too, for example about the agent's socket.
    return "failed to open file" in message and any(
        words in message for words in ("No such file or directory", "cannot find the file", "cannot find the path")
    )


def _fields(value: JsonValue, command: str) -> Mapping[str, JsonValue]:
    if not isinstance(value, dict):
        raise GuestError(f"{command}: the agent's response is not an object: {_quoted(value)}")
    return value


def _number(fields: Mapping[str, JsonValue], name: str, command: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int):
        raise GuestError(f"{command}: the agent's response has no {name}: {_quoted(fields)}")
    return value


async def _bytes(fields: Mapping[str, JsonValue], name: str, command: str) -> bytes:
    value = fields.get(name, "")
    try:
        return await untrusted_json.decode_base64(value if isinstance(value, str) else "")
    except ValueError as error:
        raise GuestError(f"{command}: {name} is not base64") from error


def _quoted(value: object) -> str:
    """Return guest data as text, truncated."""
    return ascii(value)[:_MAX_QUOTED_CHARS]


def guest_machine_id(machine_id: str) -> str:
    """Return the machine id of a guest: 32 hex digits, a function of our machine id."""
    return uuid5(_MACHINE_IDS, machine_id).hex


async def renew_identity(agent: GuestAgent, *, machine_id: str, windows: bool) -> None:
    """Give a fork the host's time, its own machine id and fresh entropy, before anything else runs in it.

    A fork wakes with its template's time and secrets. The kernel's random numbers are renewed by the virtual generation
    id, which QEMU changes for each fork (drivers/virt/vmgenid.c: the guest is interrupted and reseeds); entropy is
    written here too, for kernels without that driver. The host name stays: it appears in prompts, and the members of a
    group must look alike. docs/evidence/fork-correctness.md lists every hazard.

    Raises:
        GuestError: A step failed; the fork must not be used.
    """
    if windows:
        await agent.set_time(time.time_ns())
        return
    # The agent writes files by itself; only `date` is a program. Each program costs a slow guest 0.1 s.
    await agent.write_file("/dev/urandom", secrets.token_bytes(_SEED_BYTES), timeout_s=_WAKE_TIMEOUT_S)
    await agent.write_file("/etc/machine-id", f"{guest_machine_id(machine_id)}\n".encode(), timeout_s=_WAKE_TIMEOUT_S)
    result = await agent.run(["/bin/date", "-u", "-s", f"@{time.time():.6f}"], timeout_s=_WAKE_TIMEOUT_S)
    # A container has the host's clock and cannot set it.
    if result.exit_code and not await agent.shows_time(time.time_ns(), timeout_s=_WAKE_TIMEOUT_S):
        message = result.stderr.decode("utf-8", "replace").strip()
        raise GuestError(f"machine {machine_id}: its clock could not be set (exit {result.exit_code}): {message}")
