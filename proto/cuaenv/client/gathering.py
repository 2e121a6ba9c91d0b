"""Gather the slots of a group that has waited for long, one by one, on one host of a cluster.

A cluster's queue lets every group pass that fits, so a large group would wait for as long as smaller ones come. Each
client therefore gathers slots for its oldest waiting group: it announces this at a host, other clients then leave that
host's slots, and single reservations there take each slot that becomes free. docs/scale.md has the effect.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from cuaenv.client.errors import EnvError
from cuaenv.client.place import OpenRequest
from cuaenv.client.ray_cluster import Cluster, HostReport, Reservation
from cuaenv.client.slots import GATHER_AFTER_S, GATHER_REST_S, SlotLedger

logger = logging.getLogger(__name__)

#: Most hosts that are asked at one attempt.
_MAX_ASKED: Final = 8
#: An announcement that is not renewed ends after this.
_TTL_S: Final = 10.0
_PAUSE_S: Final = 1.0

Key = tuple[str, str]


class SlotGatherer:
    """Gathers for one client: for one group at a time, in the order in which they began to wait."""

    def __init__(
        self,
        cluster: Cluster,
        slots: SlotLedger[Key, Reservation],
        *,
        rng: random.Random,
        is_usable: Callable[[OpenRequest, str], Awaitable[bool]],
        changed: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            slots: Those that the client holds; gathered ones are added, unused.
            rng: Draws the host, and this client's name.
            is_usable: Whether the host of a node can open the episodes.
            changed: Called when there are more slots.
        """
        self._cluster = cluster
        self._slots = slots
        self._rng = rng
        self._is_usable = is_usable
        self._changed = changed
        self._name = f"{rng.getrandbits(64):016x}"
        self._turn = asyncio.Lock()
        self._opening: OpenRequest | None = None
        self._key: Key | None = None
        self._rest_until_s = 0.0
        self._left_until_s: dict[str, float] = {}
        """Nodes on which other clients gather."""

    def may_use(self, opening: OpenRequest, node_id: str, report: HostReport) -> bool:
        if report.gathered_by not in {"", self._name}:
            self._left_until_s[node_id] = _now_s() + _TTL_S
            return False
        self._left_until_s.pop(node_id, None)
        return self._key is None or self._key[0] != node_id or self._opening is opening

    def is_gathered(self, key: Key) -> bool | None:
        """See `SlotLedger.surplus`."""
        if key == self._key:
            return True
        return False if self._left_until_s.get(key[0], 0.0) > _now_s() else None

    async def run(self, opening: OpenRequest, pool: str) -> None:
        """Wait, and then gather slots for an opening until this is cancelled. The opening finds them in the ledger."""
        await asyncio.sleep(GATHER_AFTER_S)
        async with self._turn:
            await asyncio.sleep(self._rest_until_s - _now_s())
            self._opening = opening
            try:
                while True:
                    try:
                        await self._try(opening, pool)
                    except Exception as error:  # of Ray, whose errors are many: another attempt may succeed
                        logger.warning("pool %s: slots could not be gathered: %s", pool, error)
                    await asyncio.sleep(_PAUSE_S)
            finally:
                self._opening = None

    async def _try(self, opening: OpenRequest, pool: str) -> None:
        """Gather on one host, until it cannot be used any longer."""
        capacities = await self._cluster.capacities()
        able = [node for node, pools in capacities.items() if pools.get(pool, 0) >= opening.machine_count]
        self._rng.shuffle(able)
        for node_id in able[:_MAX_ASKED]:
            if await self._is_usable(opening, node_id) and await self._cluster.gather(node_id, self._name, _TTL_S):
                logger.info("a group of %s has waited long; its slots are gathered on %s", opening.size, node_id)
                await self._gather(opening, (node_id, pool))
                return

    async def _gather(self, opening: OpenRequest, key: Key) -> None:
        node_id, pool = self._key = key
        pending: set[asyncio.Task[Reservation]] = set()
        misplaced: list[Reservation] = []
        try:
            while await self._cluster.gather(node_id, self._name, _TTL_S) and await self._is_usable(opening, node_id):
                lacking = opening.machine_count - self._slots.reusable_count(key, now_s=_now_s())
                for _ in range(lacking - len(pending)):
                    pending.add(asyncio.create_task(self._cluster.reserve(pool, 1, node_id=node_id), name="gather"))
                if not pending or misplaced:
                    await asyncio.sleep(_PAUSE_S)
                while misplaced:
                    self._cluster.free(misplaced.pop())
                if pending:
                    done, pending = await asyncio.wait(pending, timeout=_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
                    for reserving in sorted(done, key=lambda one: one.exception() is not None):
                        self._keep(key, reserving.result(), misplaced)  # if it raises, none is left
        finally:
            self._key = None
            self._rest_until_s = _now_s() + GATHER_REST_S
            for reserving in pending:
                reserving.cancel()
            if pending:
                await asyncio.wait(pending)
            held = [one.result() for one in pending if not one.cancelled() and one.exception() is None]
            for reservation in [*held, *misplaced]:
                self._cluster.free(reservation)
            with suppress(EnvError):
                await self._cluster.gather(node_id, self._name, 0.0)
            self._changed()

    def _keep(self, key: Key, reservation: Reservation, misplaced: list[Reservation]) -> None:
        """Add a slot to those that the client holds. On another node that shares the address, it is of no use."""
        if reservation.node_id != key[0]:
            misplaced.append(reservation)
            return
        self._slots.add(key, reservation, 1, now_s=_now_s())
        self._slots.give(key, 1, now_s=_now_s())
        self._changed()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
