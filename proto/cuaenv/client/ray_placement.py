"""Reserve the machines of each group in a Ray cluster, and open the group on the host where they are.

Ray queues the groups, in order of arrival, and shows them to its autoscaler. The host's daemon still admits them: a
reservation without a machine behind it only waits in that daemon's queue.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self, TypeVar

from cuaenv.client.errors import BadRequest, EnvError, GroupTooLarge, PoolExhausted, PoolNotFound, Unavailable
from cuaenv.client.gathering import SlotGatherer
from cuaenv.client.host import Host
from cuaenv.client.place import HostTable, OpenRequest, Place, note_failure
from cuaenv.client.ray_cluster import Cluster, HostReport, Reservation, resource_of
from cuaenv.client.slots import LINGER_S, SlotLedger
from cuaenv.client.targets import Address
from cuaenv.v1 import env_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long reservations on unusable hosts are held, so that Ray offers other ones; then they are tried again.
_HOLD_S: Final = 5.0
#: Most such reservations of one opening.
_MAX_HELD: Final = 64
_POLL_S: Final = 1.0
_GATHERED: Final = "its slots are gathered for another group"
_LIST_TIMEOUT: Final = timedelta(seconds=30)


class RayPlacement:
    """A `Placement` that reserves machines in a Ray cluster."""

    only_host: Host | None = None

    def __init__(self, cluster: Cluster, *, table: HostTable, rng: random.Random) -> None:
        self._cluster = cluster
        self._table = table
        self._rng = rng
        self._pool_by_task: dict[str, str] = {}
        self._slots: SlotLedger[tuple[str, str], Reservation] = SlotLedger()
        self._freeing: asyncio.TimerHandle | None = None
        self._gatherer = SlotGatherer(
            cluster, self._slots, rng=rng, is_usable=self._is_usable, changed=self._note_unused
        )

    def __repr__(self) -> str:
        return f"<RayPlacement {list(self._table)}, {self._slots}>"

    async def place(self, opening: OpenRequest) -> Place:
        """See `Placement`. Raises: GroupTooLarge, PoolNotFound: at once, if no host of the cluster can hold it."""
        reasons: dict[str, str] = {}
        try:
            async with asyncio.timeout_at(opening.deadline_s):
                pool = await self._feasible_pool(opening)
                return await self._place(opening, pool, reasons)
        except TimeoutError:
            raise opening.error or _no_room(opening, reasons) from None

    def failed(self, opening: OpenRequest, host: Host, error: EnvError) -> None:
        note_failure(opening, host, error, policy=self._table.retry, rng=self._rng)

    async def hosts(self, deadline_s: float) -> Sequence[Host]:
        try:
            async with asyncio.timeout_at(deadline_s):
                reports = await self._reports()
        except TimeoutError:
            raise Unavailable("the Ray cluster does not answer", code="UNAVAILABLE") from None
        found = [self._host(report) for report in reports if report.state == "up"]
        if not found:
            states = ", ".join(f"{report.node} {report.state} {report.problem}".strip() for report in reports)
            raise Unavailable(f"no host of the Ray cluster is up: {states or 'none has joined'}", code="UNAVAILABLE")
        return found

    async def aclose(self) -> None:
        if self._freeing is not None:
            self._freeing.cancel()
        for key in self._slots.nodes():
            for reservation in self._slots.drop(key):
                self._cluster.free(reservation)
        await self._cluster.aclose()

    # Reserving

    async def _place(self, opening: OpenRequest, pool: str, reasons: dict[str, str]) -> Place:
        """Use slots that this client holds, or reserve more, on a host that can open the episodes.

        Ray does not know which hosts can. Reservations on others are held for a while, so that the next one is
        elsewhere.
        """
        if (place := await self._reuse(opening, pool, reasons)) is not None:
            return place
        async with (
            _Reservations(self._cluster, pool, opening.machine_count) as reservations,
            _running(self._gatherer.run(opening, pool), name=f"gather:{pool}"),
        ):
            while True:
                changed = self._table.changed
                if (place := await self._reuse(opening, pool, reasons)) is not None:
                    return place
                reservation = await reservations.next(changed)
                if reservation is None:
                    continue
                host, reason = await self._usable_host(opening, reservation.node_id)
                if host is not None:
                    return self._hold(opening, pool, reservations.take(reservation), host)
                if reason == _GATHERED:
                    self._cluster.free(reservations.take(reservation))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await changed.wait()
                    continue
                reasons[reservation.node_id] = reason
                if await self._are_all_excluded(opening, pool):
                    raise list(opening.excluded.values())[-1]
                if len(reasons) >= len(await self._cluster.capacities()):
                    await asyncio.sleep(_POLL_S)  # every host was refused
                    reservations.free_all()
                    reasons.clear()

    async def _reuse(self, opening: OpenRequest, pool: str, reasons: Mapping[str, str]) -> Place | None:
        """Use held slots of a host that can open the episodes; None if there are none."""
        unusable: set[str] = set(reasons)
        count, now_s = opening.machine_count, asyncio.get_running_loop().time()
        while True:
            key = self._slots.find(count, accepts=lambda key: key[1] == pool and key[0] not in unusable, now_s=now_s)
            if key is None:
                return None
            host, _ = await self._usable_host(opening, key[0])
            if host is None:
                unusable.add(key[0])
            elif self._slots.find(count, accepts=key.__eq__, now_s=now_s) is not None:  # still unused
                self._slots.take(key, count)
                return Place(host, slot_count=count, free=partial(self._give, key))

    def _hold(self, opening: OpenRequest, pool: str, reservation: Reservation, host: Host) -> Place:
        key, count = (reservation.node_id, pool), opening.machine_count
        self._slots.add(key, reservation, count, now_s=asyncio.get_running_loop().time())
        return Place(host, slot_count=count, free=partial(self._give, key))

    def _give(self, key: tuple[str, str], count: int) -> None:
        """Leave slots to this client's next groups, or free them soon."""
        self._slots.give(key, count, now_s=asyncio.get_running_loop().time())
        self._note_unused()

    def _note_unused(self) -> None:
        self._table.note_change()
        self._free_soon()

    def _free_soon(self) -> None:
        if self._freeing is None and self._slots.has_unused:
            self._freeing = asyncio.get_running_loop().call_later(LINGER_S, self._free_surplus)

    def _free_surplus(self) -> None:
        self._freeing = None
        now_s = asyncio.get_running_loop().time()
        for reservation in self._slots.surplus(now_s=now_s, is_gathered=self._gatherer.is_gathered):
            self._cluster.free(reservation)
        self._free_soon()

    async def _usable_host(self, opening: OpenRequest, node_id: str) -> tuple[Host | None, str]:
        """Return the host of a node, or None and why it cannot open the episodes now."""
        try:
            report = await self._cluster.report(node_id)
        except Unavailable as error:
            return None, str(error)
        if report.state != "up":
            return None, f"{report.node} is {report.state} {report.problem}".strip()
        if not self._gatherer.may_use(opening, node_id, report):
            return None, _GATHERED
        host = self._host(report)
        if (error_there := opening.excluded.get(host)) is not None:
            return None, f"{report.node}: {error_there}"
        if host.backs_off_until_s(opening.task, opening.pool) > asyncio.get_running_loop().time():
            return None, f"{report.node}: {host.last_error}"
        return host, ""

    async def _is_usable(self, opening: OpenRequest, node_id: str) -> bool:
        return (await self._usable_host(opening, node_id))[0] is not None

    async def _are_all_excluded(self, opening: OpenRequest, pool: str) -> bool:
        if not opening.excluded:
            return False
        capacities = await self._cluster.capacities()
        able = sum(pools.get(pool, 0) >= opening.machine_count for pools in capacities.values())
        return len(opening.excluded) >= able

    def _host(self, report: HostReport) -> Host:
        return self._table.host(Address(report.endpoint, ca=report.ca))

    # Feasibility

    async def _feasible_pool(self, opening: OpenRequest) -> str:
        """Return the pool of an opening. Waits while no host has joined. Raises: GroupTooLarge, PoolNotFound."""
        is_logged = False
        while not (capacities := await self._cluster.capacities()):
            if not is_logged:
                logger.warning("no host has joined the Ray cluster yet: no node has a resource %s", resource_of("POOL"))
                is_logged = True
            await asyncio.sleep(_POLL_S)
        pool = opening.pool or self._known_pool(opening.task) or await self._pool_of_task(opening.task, capacities)
        most = max((pools.get(pool, 0) for pools in capacities.values()), default=0)
        if not most:
            names = sorted({name for pools in capacities.values() for name in pools})
            raise PoolNotFound(
                f"pool {pool!r}: no node of the Ray cluster has the resource {resource_of(pool)}; the cluster has"
                f" {', '.join(map(resource_of, names))}",
                code="NOT_FOUND",
            )
        if opening.machine_count > most:
            branches = f" with {opening.branch_count} branches" if opening.branch_count else ""
            raise GroupTooLarge(
                f"a group of {opening.size}{branches} needs {opening.machine_count} {resource_of(pool)} on one host,"
                f" and the largest host of the Ray cluster has {most}; ask for fewer, or add a larger host",
                code="FAILED_PRECONDITION",
            )
        return pool

    def _known_pool(self, task: str) -> str:
        for host in self._table:
            if pool := host.pool_of(task):
                return pool
        return self._pool_by_task.get(task, "")

    async def _pool_of_task(self, task: str, capacities: Mapping[str, Mapping[str, int]]) -> str:
        """Return the only pool, or the only one that runs the task's system. Raises: EnvError."""
        names = sorted({name for pools in capacities.values() for name in pools})
        if len(names) == 1:
            return names[0]
        reports = [report for report in await self._reports() if report.state == "up"]
        for report in reports:
            request = env_pb2.ListTasksRequest(task_ids=[task], page_size=1)
            response = await self._host(report).connection.call("ListTasks", request, _LIST_TIMEOUT)
            systems = {one.os for one in response.tasks}
            fitting = {name for each in reports for name, system in (each.pools or {}).items() if system in systems}
            if len(fitting) == 1:
                pool = self._pool_by_task[task] = fitting.pop()
                return pool
        raise BadRequest(
            f"task {task}: its pool is not known, and the Ray cluster has several: {', '.join(names)}; name one (pool)",
            code="INVALID_ARGUMENT",
            field="pool",
        )

    async def _reports(self) -> list[HostReport]:
        node_ids = await self._cluster.capacities()
        reports = await asyncio.gather(*map(self._cluster.report, node_ids), return_exceptions=True)
        for report in reports:
            if isinstance(report, BaseException) and not isinstance(report, Unavailable):
                raise report
        return [report for report in reports if isinstance(report, HostReport)]


class _Reservations:
    """The reservations of one opening: one that is awaited, and others that are held but not used.

    Leaving the context frees all that were not taken.
    """

    def __init__(self, cluster: Cluster, pool: str, count: int) -> None:
        self._cluster = cluster
        self._pool = pool
        self._count = count
        self._held: list[Reservation] = []
        self._reserving: asyncio.Task[Reservation] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.free_all()
        if self._reserving is not None:
            self._reserving.cancel()
            await asyncio.wait({self._reserving})
            if not self._reserving.cancelled() and self._reserving.exception() is None:
                self._cluster.free(self._reserving.result())

    async def next(self, changed: asyncio.Event) -> Reservation | None:
        """Hold and return the next reservation; None after a change, or when the held ones were freed."""
        if self._reserving is None:
            reserve = self._cluster.reserve(self._pool, self._count)
            self._reserving = asyncio.create_task(reserve, name=f"reserve:{self._pool}")
        async with _running(changed.wait(), name="wait-for-change") as change:
            both = {self._reserving, change}
            timeout_s = _HOLD_S if self._held else None
            done, _ = await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done or len(self._held) >= _MAX_HELD:
            self.free_all()
        if not self._reserving.done():
            return None
        reservation, self._reserving = self._reserving.result(), None
        self._held.append(reservation)
        return reservation

    def take(self, reservation: Reservation) -> Reservation:
        self._held.remove(reservation)
        return reservation

    def free_all(self) -> None:
        while self._held:
            self._cluster.free(self._held.pop())


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, T], *, name: str) -> AsyncIterator[asyncio.Task[T]]:
    """Run a task during the block, and cancel it at the end."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def _no_room(opening: OpenRequest, reasons: Mapping[str, str]) -> EnvError:
    unusable = f"; unusable hosts: {'; '.join(reasons.values())}" if reasons else ""
    return PoolExhausted(
        f"the Ray cluster had no host with {opening.machine_count} free machines in time{unusable}; raise the timeout,"
        " or add hosts",
        code="RESOURCE_EXHAUSTED",
    )
