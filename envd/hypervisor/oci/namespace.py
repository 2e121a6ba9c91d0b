"""The daemon's end of `holder.py`: starts it, sends it requests, and reports the ends of processes.

The containers of a daemon live in namespaces that end with the daemon, so a daemon that was killed leaves none.
"""

import asyncio
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pydantic import JsonValue

from envd.base.errors import ConfigError, HypervisorError
from envd.hypervisor.oci import holder
from envd.hypervisor.oci.ids import IdMap

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 20.0
_MAX_LINE_BYTES = 1 << 16


class Namespace:
    """Namespaces of users, mounts and processes, with some directories of the host."""

    def __init__(
        self, process: asyncio.subprocess.Process, *, on_exit: Callable[[int, int], None], on_end: Callable[[str], None]
    ) -> None:
        self._process = process
        self._on_exit = on_exit
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[JsonValue]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.problem = ""
        """Why nothing can be done in it any more; empty while it can."""

    @classmethod
    async def open(
        cls,
        directories: Mapping[str, Path],
        *,
        ids: IdMap,
        on_start: Callable[[int], None] = lambda _pid: None,
        on_exit: Callable[[int, int], None] = lambda _pid, _status: None,
        on_end: Callable[[str], None] = lambda _reason: None,
    ) -> "Namespace":
        """Create the namespaces.

        Args:
            directories: Directories of the host by the names that `inside` takes.
            on_start: Called with the host's id of the process that owns the namespaces, while it has no children.
            on_exit: Called with the process id there and exit code (negative: signal) of each process that ends.
            on_end: Called with the reason when they have ended with all their processes, unless `aclose` ended them.

        Raises:
            ConfigError: The kernel does not allow it, or a tool is missing.
        """
        command = [
            sys.executable,
            "-I",
            "-S",
            holder.__file__,
            *(f"{name}={path}" for name, path in directories.items()),
        ]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C ends the daemon alone, which then destroys its machines
        )  # fmt: skip
        namespace = cls(process, on_exit=on_exit, on_end=on_end)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await namespace._expect("unshared")
                on_start(process.pid)
                for kind in ("uid", "gid"):
                    await _write_map(process.pid, kind, ids)
                namespace._send(b"\n")
                await namespace._expect("ready")
        except BaseException as error:
            await namespace.aclose()
            if isinstance(error, TimeoutError):
                raise ConfigError("hypervisor oci: the namespaces of containers were not created in time") from error
            raise
        namespace._reading = asyncio.create_task(namespace._read(), name="namespace")
        return namespace

    @staticmethod
    def inside(name: str) -> PurePosixPath:
        """Return the path in the namespace of a directory of `open`."""
        return PurePosixPath(holder.DIRECTORIES) / name

    async def call(self, do: str, **arguments: JsonValue) -> JsonValue:
        """Run a request of `holder.py`; a cancelled caller leaves it running. Raises: HypervisorError: it failed."""
        if self.problem:
            raise HypervisorError(self.problem)
        number = next(self._ids)
        answer: asyncio.Future[JsonValue] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(json.dumps({"id": number, "do": do, "arguments": arguments}).encode() + b"\n")
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def aclose(self) -> None:
        """End every process in the namespaces, and remove their mounts. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail("the namespaces of its containers were closed")
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _send(self, data: bytes) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(data)

    async def _expect(self, event: str) -> None:
        """Raises: ConfigError: The process ended instead."""
        assert self._process.stdout is not None  # noqa: S101 -- it was started with a pipe
        assert self._process.stderr is not None  # noqa: S101
        line = await self._process.stdout.readline()
        if not line:
            problem = (await self._process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(
                f"hypervisor oci: containers cannot be created here: {problem}; `envd doctor` says what the host lacks"
            )
        if json.loads(line)["event"] != event:
            raise ConfigError(f"hypervisor oci: unexpected answer {line!r}")

    async def _read(self) -> None:
        problem = "the process that owns the containers' namespaces has ended; restart envd"
        try:
            await self._read_answers()
        except Exception as error:
            problem = f"the process that owns the containers' namespaces could not be read: {error!r}; restart envd"
            logger.exception("%s", problem)
            with suppress(ProcessLookupError):
                self._process.kill()
        self._fail(problem)
        self._on_end(self.problem)

    async def _read_answers(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if message["event"] == "exit":
                self._on_exit(message["pid"], message["status"])
            elif (answer := self._waiting.get(message["id"])) is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(HypervisorError(message["error"]))
                else:
                    answer.set_result(message["result"])

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(HypervisorError(self.problem))


async def _write_map(pid: int, kind: str, ids: IdMap) -> None:
    """Map the user or group ids of a process's user namespace. Raises: ConfigError."""
    lines = ids.lines(groups=kind == "gid")
    if ids.is_privileged:
        text = "".join(f"{inside} {outside} {count}\n" for inside, outside, count in lines)
        try:
            Path(f"/proc/{pid}/{kind}_map").write_text(text)
        except OSError as error:
            raise ConfigError(f"hypervisor oci: {kind}_map cannot be written: {error}") from error
        return
    tool = f"new{kind}map"
    if shutil.which(tool) is None:
        raise ConfigError(f"hypervisor oci: {tool} is missing; install the package uidmap")
    process = await asyncio.create_subprocess_exec(
        tool, str(pid), *(str(number) for line in lines for number in line),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode:
        raise ConfigError(f"hypervisor oci: {tool} failed: {output.decode(errors='replace').strip()}")


def owner_of_files(ids: IdMap) -> tuple[int, int]:
    """Return the (user, group) that a directory of this daemon must have for the containers' root to write to it."""
    return (ids.root_uid, ids.root_gid) if os.geteuid() == 0 else (-1, -1)
