"""Stop a machine's processors and let them go on, by a QEMU monitor of our own.

libvirt does it too, in 3 to 5 ms: it writes its record of the domain to disk before it answers, twice. Each step of an
episode resumes a machine and pauses it. QEMU alone takes half a millisecond, and libvirt learns of both by its events.
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from qemu.qmp import ConnectError, ExecuteError, QMPClient, QMPError
from qemu.qmp.qmp_client import GreetingError

from envd.errors import HypervisorError

#: A QEMU that does not answer for so long was itself stopped, or waits for a disk.
_TIMEOUT_S = 60.0
#: How often to call before an answer that is no greeting is taken for an error.
_GREETINGS = 8

# What goes wrong is raised; the library would log it too.
logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)


class RunSwitch:
    """One machine's. Connects when first used."""

    def __init__(self, socket: Path, *, machine_id: str) -> None:
        self._socket = socket
        self._machine_id = machine_id
        self._client: QMPClient | None = None
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<RunSwitch of {self._machine_id}, {'connected' if self._client else 'not connected'}>"

    async def stop(self) -> None:
        """Stop the processors between two instructions. Raises: HypervisorError."""
        await self._execute("stop")

    async def go(self) -> None:
        """Let the processors run. Raises: HypervisorError."""
        await self._execute("cont")

    async def close(self) -> None:
        """Disconnect. Idempotent; never fails."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(QMPError, OSError, EOFError):
                await client.disconnect()

    async def _execute(self, command: str) -> None:
        try:
            async with self._turn, asyncio.timeout(_TIMEOUT_S):
                if self._client is None:
                    self._client = await self._connect()
                await self._client.execute(command)
        except ExecuteError as error:
            raise HypervisorError(f"machine {self._machine_id}: QEMU refused {command}: {error}") from error
        except (QMPError, OSError, EOFError) as error:
            await self.close()
            raise HypervisorError(f"machine {self._machine_id}: its monitor does not answer: {error}") from error

    async def _connect(self) -> QMPClient:
        for attempt in range(1, _GREETINGS + 1):
            client = QMPClient(self._machine_id)
            client.events.event_filter = lambda _event: False  # nobody reads them, and they would pile up
            try:
                await client.connect(str(self._socket))
            except ConnectError as error:
                # QEMU sends its greeting a turn of its loop after it accepts, and what happens to the machine in
                # between (a viewer comes, it is stopped by libvirt) it tells of first: no greeting, says the library.
                if attempt == _GREETINGS or not isinstance(error.exc, GreetingError):
                    raise
            else:
                return client
        raise AssertionError("returned or raised")
