"""Find leftovers on the host and in the database at each interval, count them and remove them.

A thing that is being created or removed looks like a leftover for a moment, so only what has been one for a grace
period is removed.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from envd.base.clock import Clock
from envd.base.errors import EnvdError
from envd.base.store.statements import MachineRow, delete_machine
from envd.base.store.store import Store
from envd.hypervisor.machine import Leftover, LeftoverKind
from envd.pool.pool import Pool

logger = logging.getLogger(__name__)


class Audited(Protocol):
    """A source of leftovers."""

    async def leftovers(self) -> list[Leftover]:
        """Return the present leftovers. Raises: EnvdError: they are not known."""

    async def remove(self, leftover: Leftover) -> None:
        """Remove a leftover that still is one. Raises: EnvdError."""


class MachineRows:
    """Audits the rows of machines."""

    def __init__(self, store: Store, pools: Iterable[Pool]) -> None:
        self._store = store
        self._pools = tuple(pools)

    async def leftovers(self) -> list[Leftover]:
        """Return rows of machines that are in no pool."""
        rows = await self._store.rows(MachineRow)
        return [Leftover(LeftoverKind.DATABASE_ROW, f"machine {r.machine_id}") for r in rows if self._is_stray(r)]

    async def remove(self, leftover: Leftover) -> None:
        """Delete the machine's row."""
        for row in await self._store.rows(MachineRow):
            if f"machine {row.machine_id}" == leftover.name and self._is_stray(row):
                await self._store.commit(delete_machine(row.machine_id))

    def _is_stray(self, row: MachineRow) -> bool:
        return not any(pool.has(row.machine_id) for pool in self._pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverAges:
    """The leftovers of one source, and since when each is known."""

    since_s: dict[Leftover, float]

    def updated(self, found: Iterable[Leftover], *, now_s: float) -> "LeftoverAges":
        """Return the ages of `found`; the age of one that was gone in between restarts."""
        return LeftoverAges(since_s={leftover: self.since_s.get(leftover, now_s) for leftover in found})

    def overdue(self, *, now_s: float, grace_s: float) -> list[Leftover]:
        """Return the leftovers that are older than the grace period."""
        return [leftover for leftover, since_s in self.since_s.items() if now_s - since_s >= grace_s]


class Audit:
    """Audits several sources."""

    def __init__(
        self,
        sources: Sequence[Audited],
        *,
        interval_s: float,
        grace_s: float,
        clock: Clock,
        on_leftover: Callable[[Leftover], None],
    ) -> None:
        """Set up an audit; nothing is checked before `run`.

        Args:
            sources: Where to look for leftovers.
            interval_s: Time between two checks.
            grace_s: Age at which a leftover is removed.
            clock: Source of time.
            on_leftover: Called once for each leftover that reaches that age.
        """
        self._sources = sources
        self._interval_s = interval_s
        self._grace_s = grace_s
        self._clock = clock
        self._on_leftover = on_leftover
        self._ages = [LeftoverAges(since_s={}) for _ in sources]
        self._reported: set[Leftover] = set()

    async def run(self) -> None:
        """Check at every interval, until cancelled."""
        while True:
            await self._clock.sleep(self._interval_s)
            await self.check()

    async def check(self) -> None:
        """Check once; failures are logged and retried at the next check."""
        seen: set[Leftover] = set()
        for index, source in enumerate(self._sources):
            try:
                found = await source.leftovers()
            except EnvdError as error:
                logger.warning("audit: cannot look for leftovers: %s", error)
                seen.update(self._ages[index].since_s)
                continue
            now_s = self._clock.monotonic()
            self._ages[index] = self._ages[index].updated(found, now_s=now_s)
            seen.update(found)
            for leftover in self._ages[index].overdue(now_s=now_s, grace_s=self._grace_s):
                await self._remove(leftover, source)
        self._reported &= seen

    async def _remove(self, leftover: Leftover, source: Audited) -> None:
        if leftover not in self._reported:
            self._reported.add(leftover)
            self._on_leftover(leftover)
            logger.warning("audit: removing leftover %s %s", leftover.kind.value, leftover.name)
        try:
            await source.remove(leftover)
        except EnvdError as error:
            logger.warning("audit: leftover %s %s not removed: %s", leftover.kind.value, leftover.name, error)
