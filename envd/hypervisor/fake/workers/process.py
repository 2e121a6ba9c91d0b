"""One worker process as the daemon sees it: calls, and reports of lost machines."""

import asyncio
import itertools
import logging
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any, Protocol

import envd
from envd.base.errors import HypervisorError, MachineLost
from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.fake.workers.link import Link
from envd.hypervisor.fake.workers.worker import CANCEL, LOST, WORKER

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0


class Losable(Protocol):
    """A machine in the worker."""

    def lose(self, reason: str) -> None:
        """Declare it lost."""


class WorkerProcess:
    """A worker process; `start` makes one."""

    def __init__(self, process: asyncio.subprocess.Process, display_path: str) -> None:
        self.display_path = display_path
        """Address of the socket for displays; a connection starts with a line with the machine's id."""
        self.machines: dict[str, Any] = {}
        """Machines in it by id, until they are destroyed."""
        self.is_ended = False
        self.link = Link(on_message=self._receive, on_closed=self._on_closed)
        self._process = process
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._is_closing = False

    def __repr__(self) -> str:
        ended = " ended" if self.is_ended else ""
        return f"<WorkerProcess {self._process.pid}{ended} | {len(self.machines)} machines>"

    @classmethod
    async def start(cls, faults: Faults) -> "WorkerProcess":
        """Start a worker; its first calls wait until it has imported its modules. Raises: HypervisorError."""
        ours, theirs = socket.socketpair()
        name = f"envd-drawn-{secrets.token_hex(16)}"
        path = os.pathsep.join(entry for entry in [str(Path(envd.__file__).parents[1]), *sys.path] if entry)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "envd.hypervisor.fake.workers", str(theirs.fileno()), name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C in a terminal reaches the whole group; the daemon ends its workers itself.
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise HypervisorError(f"a worker process for drawn desktops cannot be started: {error}") from error
        except BaseException:
            ours.close()
            raise
        worker = cls(process, "\0" + name)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker.link, sock=ours)
        worker.post(WORKER, "use_faults", faults)
        return worker

    async def call(self, target: str, method: str, *arguments: object, **keywords: object) -> Any:
        """Call a method of a machine, or of `WORKER`, and return its result. Raises what it raises.

        Raises:
            MachineLost: The worker ended; `target` is a machine.
            HypervisorError: The worker ended; `target` is `WORKER`.
        """
        if self.is_ended:
            raise self._ended_error(target)
        number = next(self._numbers)
        response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = target, response
        self.link.send((number, target, method, arguments, keywords))
        try:
            return await response
        except asyncio.CancelledError:
            self.link.send((number, target, CANCEL, (), {}))
            raise
        finally:
            self._pending.pop(number, None)

    def post(self, target: str, method: str, *arguments: object) -> None:
        """Call a method without waiting for its result."""
        self.link.send((next(self._numbers), target, method, arguments, {}))

    async def close(self) -> None:
        """End the process."""
        self._is_closing = True
        self.link.close()
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _receive(self, message: tuple[int, Any, Any]) -> None:
        number, result, error = message
        if number == LOST:
            machine: Losable | None = self.machines.get(result)
            if machine is not None:
                machine.lose(error)
            return
        _, response = self._pending.get(number, (None, None))
        if response is None or response.done():
            return
        if error is None:
            response.set_result(result)
        else:
            response.set_exception(error)

    def _on_closed(self) -> None:
        self.is_ended = True
        if not self._is_closing:
            logger.error("worker process %d ended; its %d machines are lost", self._process.pid, len(self.machines))
        for machine in self.machines.values():
            machine.lose("the worker process that drew it ended")
        for target, response in self._pending.values():
            if not response.done():
                response.set_exception(self._ended_error(target))

    def _ended_error(self, target: str) -> HypervisorError | MachineLost:
        if target == WORKER:
            return HypervisorError(f"worker process {self._process.pid} for drawn desktops ended; try again")
        return MachineLost(f"machine {target} is gone: the worker process that drew it ended")
