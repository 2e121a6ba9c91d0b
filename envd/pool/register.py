"""The machines that exist or may exist, written to the database before a hypervisor is asked for them."""

import logging
from collections.abc import Collection

from envd.base.clock import Clock
from envd.base.store.statements import MachineRow, delete_machine, upsert
from envd.base.store.store import Store

logger = logging.getLogger(__name__)


async def unregister_all(store: Store, *, adopted: Collection[str], reaped: Collection[str]) -> None:
    """Delete the rows of a previous daemon's machines, after its hypervisor has removed the machines.

    Args:
        store: The database.
        adopted: Machines that were adopted; their rows stay.
        reaped: Machines that were found and removed.

    Raises:
        StoreError: No row was deleted.
    """
    gone = [row for row in await store.rows(MachineRow) if row.machine_id not in adopted]
    for row in gone:
        if row.machine_id not in reaped:
            logger.info("machine %s of pool %s: left nothing behind", row.machine_id, row.pool)
    await store.commit(*(delete_machine(row.machine_id) for row in gone))


class MachineRegister:
    """The rows of one pool's machines."""

    def __init__(self, pool: str, *, store: Store, clock: Clock) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock

    async def register(self, machine_id: str) -> None:
        """Record that a machine may exist from now on. Raises: StoreError: it must not be created."""
        row = MachineRow(machine_id=machine_id, pool=self._pool, enter_time_s=self._clock.now().timestamp())
        await self._store.commit(upsert(row))

    def unregister(self, machine_id: str) -> None:
        """Record that nothing of a machine is left."""
        self._store.write_soon(delete_machine(machine_id))
