"""Other systems' protocols as processes of the daemon: `envd compat`, one for each, ended with it.

They are clients like any other, over a Unix socket of the daemon, so that they need neither its certificate's authority
nor a certificate of their own. A process that ends by itself, or that does not answer, is started again at the same
address; its sessions are lost, and leases end their episodes.
"""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from envd.base.config import Config
from envd.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: Linux's limit.
_MAX_SOCKET_PATH_BYTES: Final = 107
_START_TIMEOUT_S: Final = 120.0
_END_TIMEOUT_S: Final = 10.0
#: How often a process is asked whether it serves, how long it may take to answer on a host that is busy, and how often
#: in a row it may be late: the daemon itself may have been stopped during one probe.
_PROBE_INTERVAL_S = 10.0
_PROBE_TIMEOUT_S = 20.0
_MAX_LATE: Final = 1
#: An HTTP server answers it, also one that wants TLS: with an alert.
_PROBE: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0


def local_socket_of(config: Config) -> Path | None:
    """Return the socket by which the processes reach the daemon; None without protocols.

    Raises:
        ConfigError: Its path is too long.
    """
    if not config.compat:
        return None
    path = config.state_dir / "compat.sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"state_dir {config.state_dir}: too long for the socket of compat, whose path has at most"
            f" {_MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
        )
    return path


@asynccontextmanager
async def serve_compat(config: Config, target: str) -> AsyncIterator[dict[str, str]]:
    """Run the processes of the configured protocols during the block; yield their bound addresses by name.

    Args:
        target: The daemon's address, for its own processes.

    Raises:
        ConfigError: One does not start, for example because its address is taken.
    """
    common = ["--envd", target, "--max-steps", str(config.limits.max_steps), "--parent", str(os.getpid())]
    common += ["--log-format", config.log_format, "--log-level", config.log_level]
    security = config.security
    files = {
        "--serve-cert": security.tls_cert,
        "--serve-key": security.tls_key,
        "--serve-client-ca": security.client_ca,
    }
    common += [word for option, file in files.items() if file is not None for word in (option, str(file))]
    async with AsyncExitStack() as stack:
        servers = [_CompatProcess(name, listen, common) for name, listen in config.compat_addresses.items()]
        for server in servers:
            stack.push_async_callback(server.aclose)
        try:
            # Each imports its modules for a second or two.
            async with asyncio.TaskGroup() as starting:
                for server in servers:
                    starting.create_task(server.start(), name=f"compat:{server.name}:start")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        yield {server.name: server.address for server in servers}


class _CompatProcess:
    """The process of one protocol."""

    def __init__(self, name: str, address: str, options: Sequence[str]) -> None:
        self.name = name
        self.address = address
        """HOST:PORT; the bound one once it has started."""
        self._options = options
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and from then on start it again when it ends. Raises: ConfigError."""
        await self._start()
        self._keeping = asyncio.create_task(self._keep(), name=f"compat:{self.name}")

    async def aclose(self) -> None:
        """End it. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self._end()

    async def _start(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "envd", "compat", f"{self.name}={self.address}", *self._options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            # Ctrl-C in a terminal reaches the whole group; the daemon ends the process itself.
            start_new_session=True,
        )
        line = b""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                # `protocol NAME on SCHEME://HOST:PORT`, once it serves.
                line = await process.stdout.readline() if process.stdout else b""
        except TimeoutError:
            pass
        except BaseException:
            await self._end()
            raise
        if not line:
            status = await self._end()
            raise ConfigError(
                f"compat {self.name}={self.address}: its process did not start (status {status}), its message is in the"
                " log; choose another address if this one is in use"
            )
        self.address = line.decode().rpartition("://")[2].strip()

    async def _keep(self) -> None:
        """Start the process again whenever it ends, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._process is not None:
                began_s = asyncio.get_running_loop().time()
                problem = await self._wait_broken(self._process)
                if asyncio.get_running_loop().time() - began_s > _MAX_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
                logger.error(
                    "compat %s: %s; it is started again in %g s, its clients' episodes are lost",
                    self.name,
                    problem,
                    pause_s,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            try:
                await self._start()
            except (ConfigError, OSError) as error:
                logger.error("%s; another try in %g s", error, pause_s)  # noqa: TRY400 -- the text says it all

    async def _wait_broken(self, process: Process) -> str:
        """Return why a process serves no more: it ended, or it does not answer and was killed."""
        ending = asyncio.ensure_future(process.wait())
        late_count = 0
        try:
            while late_count <= _MAX_LATE:
                await asyncio.wait({ending}, timeout=_PROBE_INTERVAL_S)
                if ending.done():
                    return f"its process ended (status {ending.result()})"
                late_count = 0 if await self._answers() else late_count + 1
            # Also ends a process that is stopped, which SIGTERM does not.
            with suppress(ProcessLookupError):
                process.kill()
            await ending
            return f"its process did not answer for {_PROBE_TIMEOUT_S:g} s, {late_count} times, and was killed"
        finally:
            ending.cancel()

    async def _answers(self) -> bool:
        """Return whether the process accepts a connection and answers, or closes it."""
        host, _, port = self.address.rpartition(":")
        loopback = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}  # noqa: S104 -- addresses of our own processes
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(loopback.get(host, host.strip("[]")), int(port))
                try:
                    writer.write(_PROBE)
                    await reader.read(1)
                finally:
                    writer.close()
        except TimeoutError:
            return False
        except OSError:
            pass  # a connection that is refused or reset: the process has ended, which its status tells, or it lives
        return True

    async def _end(self) -> int | None:
        """End the process and return its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                return await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            return await process.wait()
