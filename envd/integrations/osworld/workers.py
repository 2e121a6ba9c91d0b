"""Run OSWorld's code: one process imports it, and each job is a fork of that process in a sandbox."""

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yarl import URL

import envd
from envd.base.errors import GuestError, OsworldError
from envd.base.sandbox.enclosure import EnclosureError
from envd.base.sandbox.fork_server import ForkServer
from envd.base.streams import receive_descriptor, relayed

logger = logging.getLogger(__name__)

_ROOT = str(Path(envd.__file__).parents[1])
#: Our package is not part of that environment; only the worker program is imported from it.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from envd.integrations.osworld.worker.main import main; "
    "sys.path.remove(sys.argv[1]); main(int(sys.argv[2]), sys.argv[3:])"
)
# Threads do not survive a fork, and jobs share the CPUs anyway.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "NUMBA_CACHE_DIR": "/tmp",  # noqa: S108
    "MPLCONFIGDIR": "/tmp",  # noqa: S108
}
#: How late the worker may notice the end of a job's time, on a busy host.
_GRACE_S = 10.0
_MAX_OUTPUT_BYTES = 1 << 20
#: Concurrent connections of a job to its guest; OSWorld uses a few.
_MAX_CONNECTIONS = 32


#: The names in an installation of OSWorld: of its setup `verbs`, `getters` and `metrics`.
KnownNames = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """One setup or evaluation of one guest."""

    kind: str
    """`set_up` or `evaluate`."""
    guest_url: str
    platform: str
    """OSWorld's name of it: Linux or Windows."""
    screen_px: tuple[int, int]
    time_s: float
    """Limit in seconds; then the job is killed."""
    steps: Sequence[Mapping[str, Any]] = ()
    first_step: int = 0
    """Index of the first of `steps` in the task's setup."""
    evaluator: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files by the names that OSWorld looks for before it downloads."""
    password: str = field(default="", repr=False)
    is_stopped: bool = False
    """Whether the processes of the guest's session are stopped meanwhile."""
    on_step: Callable[[str], None] = field(default=lambda _: None, repr=False)
    """Called with the name of each setup step as it starts, such as `config[0] open`."""

    def step_name(self, line: bytes) -> str:
        """Return the name of the step that a line from the job announces; empty for any other line."""
        try:
            started = json.loads(line)["step"]
        except (ValueError, RecursionError, LookupError, TypeError):
            return ""
        names = {index: f"config[{index}] {step['type']}" for index, step in enumerate(self.steps, self.first_step)}
        return names.get(started, "") if isinstance(started, int) else ""


class OsworldWorkers:
    """Starts OSWorld's environment once and runs jobs in it, each in its own process and sandbox.

    Args:
        python: The interpreter of OSWorld's virtual environment.
        limit: Maximum of concurrent jobs. They mostly wait for guests, and share the memory of the imports.
        memory_mib: Memory limit of each process of a job.
    """

    def __init__(self, python: Path, *, limit: int = 64, memory_mib: int = 2048) -> None:
        self._python = python
        self._slots = asyncio.Semaphore(limit)
        # The directories that jobs need: the environment, and the Python that it links to.
        visible = (str(python.parents[1]), sys.base_prefix, sys.base_exec_prefix)
        command = (str(python), "-I", "-c", _PROGRAM, _ROOT, str(memory_mib << 20), *visible)
        self._server = ForkServer(command, _ENVIRONMENT)
        self._is_warned = False

    def __repr__(self) -> str:
        return f"<Workers of {self._python}{'' if self._server.pid else ' not started'}>"

    async def start(self) -> KnownNames:
        """Start the worker unless it is running; return its names. Importing OSWorld takes seconds.

        Raises:
            OsworldError: It does not start; the message says why.
        """
        try:
            greeting = await self._server.start()
        except EnclosureError as error:
            raise OsworldError(f"OSWorld cannot be imported: {error}; run `envd osworld install`") from error
        if greeting["shortcoming"] and not self._is_warned:
            self._is_warned = True
            logger.warning("OSWorld evaluations: %s", greeting["shortcoming"])
        names: KnownNames = greeting["ready"]
        return names

    async def aclose(self) -> None:
        """Stop the worker and all running jobs."""
        await self._server.aclose()

    async def run(self, job: WorkerJob) -> Mapping[str, Any]:
        """Run a job as soon as fewer than `limit` are running.

        Raises:
            GuestError: It failed, died or exceeded its limit, which implies nothing about the agent; or OSWorld does
                not start.
        """
        async with self._slots:
            try:
                await self.start()
            except OsworldError as error:
                raise GuestError(str(error)) from error
            try:
                with await self._server.open_job() as channel:
                    async with asyncio.timeout(job.time_s + _GRACE_S):
                        return await self._follow(channel, job)
            except TimeoutError:
                raise GuestError(f"exceeded its limit of {job.time_s:g} s; the worker does not respond") from None
            except (OSError, EnclosureError) as error:
                raise GuestError(f"the worker is gone: {error}") from error

    async def _follow(self, channel: socket.socket, job: WorkerJob) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(channel, self._line(job))
        data, listener = await receive_descriptor(channel, 1 << 16)
        if listener is None:
            return parse_result(await _read_all(channel, data, job))
        url = URL(job.guest_url)
        # The job reaches this service and nothing else.
        async with relayed(listener, url.host or "", url.port or 0, limit=_MAX_CONNECTIONS):
            return parse_result(await _read_all(channel, data, job))

    def _line(self, job: WorkerJob) -> bytes:
        value = {
            "kind": job.kind,
            "platform": job.platform,
            "screen_px": job.screen_px,
            "password": job.password,
            "is_stopped": job.is_stopped,
            "steps": list(job.steps),
            "first_step": job.first_step,
            "evaluator": job.evaluator,
            "timeout_s": job.time_s,
            "files": {name: str(path) for name, path in job.files.items()},
        }
        return json.dumps(value).encode() + b"\n"


def parse_result(data: bytes) -> Mapping[str, Any]:
    """Return the result in a job's output, one line of JSON per message. Raises: GuestError: There is none."""
    try:
        lines = [json.loads(line) for line in data.splitlines()]
    except (ValueError, RecursionError) as error:
        raise GuestError(f"malformed output of the worker: {error}") from error
    messages = {key: value for line in lines if isinstance(line, dict) for key, value in line.items()}
    if messages.get("end"):
        raise GuestError(str(messages["end"]))
    if "failure" in messages:
        raise GuestError(f"OSWorld's code failed: {messages['failure']}")
    result = messages.get("result")
    if "end" not in messages or not isinstance(result, dict):
        raise GuestError("the worker ended without a result")
    return result


async def _read_all(channel: socket.socket, data: bytes, job: WorkerJob) -> bytes:
    """Return the output of a job until its end, after `data`. Raises: GuestError: It is too large."""
    loop = asyncio.get_running_loop()
    while part := await loop.sock_recv(channel, 1 << 16):
        data += part
        # A line is sent in one piece and usually arrives so; if not, one step's name is lost.
        for step in filter(None, map(job.step_name, part.splitlines())):
            job.on_step(step)
        if len(data) > _MAX_OUTPUT_BYTES:
            raise GuestError(f"the worker sent more than {_MAX_OUTPUT_BYTES} bytes")
    return data
