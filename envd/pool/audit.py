"""Find leftovers on the host and in the database at each interval, count them and remove them.

A thing that is being created or removed looks like a leftover for a moment, so only what has been one for a grace
period is removed.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envd.base.clock import Clock
from envd.base.errors import EnvdError
from envd.base.store.store import EpisodeRow, MachineRow, Statement, Store, delete_episode, delete_machine
from envd.hypervisor.machine import Leftover, LeftoverKind
from envd.pool.pool import MachinePool

logger = logging.getLogger(__name__)


class Audited(Protocol):
    """A source of leftovers."""

    async def leftovers(self) -> list[Leftover]:
        """Return the present leftovers. Raises: EnvdError: they are not known."""

    async def remove(self, leftover: Leftover) -> None:
        """Remove a leftover that still is one. Raises: EnvdError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayRows:
    """Audits one table: the rows of things that do not exist."""

    store: Store
    kind: type[Any]
    thing: str
    """`machine` or `episode`: names the rows, whose id is in the column `{thing}_id`."""
    exists: Callable[[str], bool]
    delete: Callable[[str], Iterable[Statement]]

    async def leftovers(self) -> list[Leftover]:
        """Return the stray rows."""
        return [Leftover(LeftoverKind.DATABASE_ROW, f"{self.thing} {i}") for i in sorted(await self._strays())]

    async def remove(self, leftover: Leftover) -> None:
        """Delete the thing's rows."""
        for stray_id in await self._strays():
            if f"{self.thing} {stray_id}" == leftover.name:
                await self.store.commit(*self.delete(stray_id))

    async def _strays(self) -> set[str]:
        ids = {getattr(row, f"{self.thing}_id") for row in await self.store.rows(self.kind)}
        return {each for each in ids if not self.exists(each)}


def stray_rows(store: Store, pools: Sequence[MachinePool], *, has_episode: Callable[[str], bool]) -> list[StrayRows]:
    """Return the audits of the tables of machines, which are in no pool, and of episodes."""

    def has_machine(machine_id: str) -> bool:
        return any(pool.has(machine_id) for pool in pools)

    def delete(machine_id: str) -> tuple[Statement, ...]:
        return (delete_machine(machine_id),)

    return [
        StrayRows(store=store, kind=MachineRow, thing="machine", exists=has_machine, delete=delete),
        StrayRows(store=store, kind=EpisodeRow, thing="episode", exists=has_episode, delete=delete_episode),
    ]


@dataclass(slots=True, eq=False, kw_only=True)
class Audit:
    """Audits several sources. Nothing is checked before `run`."""

    sources: Sequence[Audited]
    interval_s: float
    """Time between two checks."""
    grace_s: float
    """Age at which a leftover is removed."""
    clock: Clock
    on_leftover: Callable[[Leftover], None]
    """Called once for each leftover that reaches that age."""
    _since_s: defaultdict[int, dict[Leftover, float]] = field(default_factory=lambda: defaultdict(dict), init=False)
    """The leftovers of each source, and since when each is known."""
    _reported: set[Leftover] = field(default_factory=set, init=False)

    async def run(self) -> None:
        """Check at every interval, until cancelled."""
        while True:
            await self.clock.sleep(self.interval_s)
            await self.check()

    async def check(self) -> None:
        """Check once; failures are logged and retried at the next check."""
        seen: set[Leftover] = set()
        for index, source in enumerate(self.sources):
            try:
                found = await source.leftovers()
            except EnvdError as error:
                logger.warning("audit: cannot look for leftovers: %s", error)
                seen.update(self._since_s[index])
                continue
            now_s = self.clock.monotonic()
            # The age of one that was gone in between restarts.
            known = self._since_s[index] = {each: self._since_s[index].get(each, now_s) for each in found}
            seen.update(found)
            for leftover in [each for each, since_s in known.items() if now_s - since_s >= self.grace_s]:
                await self._remove(leftover, source)
        self._reported &= seen

    async def _remove(self, leftover: Leftover, source: Audited) -> None:
        if leftover not in self._reported:
            self._reported.add(leftover)
            self.on_leftover(leftover)
            logger.warning("audit: removing leftover %s %s", leftover.kind.value, leftover.name)
        try:
            await source.remove(leftover)
        except EnvdError as error:
            logger.warning("audit: leftover %s %s not removed: %s", leftover.kind.value, leftover.name, error)
