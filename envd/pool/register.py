"""Which machines exist or may exist, written down before a hypervisor is asked for them."""

from envd.pool.clock import Clock
from envd.store.statements import MachineRow, forget_machine, put
from envd.store.store import Books


class MachineRegister:
    """The machines of one pool in the daemon's books."""

    def __init__(self, pool: str, *, books: Books, clock: Clock) -> None:
        self._pool = pool
        self._books = books
        self._clock = clock

    async def enter(self, machine_id: str) -> None:
        """Note that a machine may exist from now on. Raises: StoreError: it must not be made."""
        row = MachineRow(machine_id=machine_id, pool=self._pool, enter_time_s=self._clock.now().timestamp())
        await self._books.commit(put(row))

    def strike(self, machine_id: str) -> None:
        """Note that nothing of a machine is left."""
        self._books.note(forget_machine(machine_id))
