"""The Ray cluster that the KVM hosts have joined: reservations of machines, and what each host reports.

The only module of the client that imports Ray. Each host has one custom resource per pool (`resource_of`), with the
pool's capacity as its amount, and a named actor that reports the daemon's endpoint (`actor_of`; see `trainer.hosts`).
A reservation is a placement group of one bundle, so all of it is on one host. Its lifetime is its creator's: Ray frees
it when this process dies.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from cuaenv.client.errors import Unavailable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Namespace of the hosts' actors in the Ray cluster.
NAMESPACE: Final = "envd"
_PREFIX: Final = "envd_"
_SCHEME: Final = "ray://"
#: Each node has one unit of a resource with this prefix and its address.
_NODE: Final = "node:"
#: Waiting reservations each take a thread; further ones queue here.
_MAX_WAITING: Final = 256
#: `PlacementGroup.wait` takes whole seconds; an aborted wait ends at the latest then.
_WAIT_S: Final = 5
_REPORT_TIMEOUT_S: Final = 5.0
_connecting = threading.Lock()


def resource_of(pool: str) -> str:
    return _PREFIX + pool


def actor_of(node_id: str) -> str:
    """Return the name of a host's actor."""
    return f"{_PREFIX}host_{node_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What a host's actor reports."""

    node: str
    """Name of the node, for people."""
    state: str
    """`up` if new episodes may be opened; else `starting`, `down`, `draining` or `drained`."""
    endpoint: str = ""
    """HOST:PORT of the daemon; empty until it is known."""
    ca: str = ""
    """Certificate authority of the daemon, PEM; empty for the client's own setting."""
    problem: str = ""
    """Why it is not up."""
    pools: Mapping[str, str] | None = None
    """Operating system of the guests by pool."""
    leased_count: int = 0
    waiting_count: int = 0
    pid: int = 0
    """Process of the daemon; 0 if it was not started by the actor."""
    gathered_by: str = ""
    """Client that gathers slots on this host, which others leave to it; empty for none."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Machines held on a node."""

    node_id: str
    handle: Any


class Cluster(Protocol):
    """Reserves machines on hosts."""

    async def capacities(self) -> Mapping[str, Mapping[str, int]]:
        """Return the pools' capacities by node id, of live nodes that have any. Raises: Unavailable."""

    async def reserve(self, pool: str, count: int, *, node_id: str = "") -> Reservation:
        """Wait until machines are free on one node, and hold them. If cancelled, nothing is held.

        Args:
            node_id: The only possible node, or one that shares its address; empty for any.
        """

    def free(self, reservation: Reservation) -> None:
        """Free a reservation, in the background. Idempotent."""

    async def report(self, node_id: str) -> HostReport:
        """Return what a host reports. Raises: Unavailable: its actor does not answer."""

    async def gather(self, node_id: str, client: str, ttl_s: float) -> bool:
        """Have other clients leave a host's slots to this one for a while; 0 ends it. False if another client has it.

        Raises:
            Unavailable: Its actor does not answer.
        """

    async def aclose(self) -> None:
        """Wait until everything is freed. Idempotent."""


def capacities_of(resources: Mapping[str, float]) -> dict[str, int]:
    return {name.removeprefix(_PREFIX): int(amount) for name, amount in resources.items() if name.startswith(_PREFIX)}


def is_gathered(bundle: Mapping[str, float]) -> bool:
    """Return whether a bundle is a slot that a client gathers on one node, for a group that waits as well."""
    return any(name.startswith(_NODE) for name in bundle)


def connect(target: str) -> Any:
    """Connect this process to a target's cluster, unless it is connected, and return the module `ray`.

    Raises:
        Unavailable: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray  # noqa: PLC0415 -- only users of ray:// have it
    except ImportError as error:
        raise Unavailable(f"{target}: Ray is not installed; install `envd-trainer[ray]`", host=target) from error
    with _connecting:
        if not ray.is_initialized():
            try:
                ray.init(address=target.removeprefix(_SCHEME), namespace=NAMESPACE, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise Unavailable(f"{target}: no Ray cluster can be reached: {error}", host=target) from error
    return ray


class RayCluster:
    """A `Cluster` of Ray."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._ray: Any = None
        self._actors: dict[str, Any] = {}
        self._waiting = ThreadPoolExecutor(_MAX_WAITING, thread_name_prefix="ray-reserve")
        # Apart from the waiting ones: frees are what those wait for.
        self._calling = ThreadPoolExecutor(4, thread_name_prefix="ray-call")
        self._freeing: set[asyncio.Future[None]] = set()

    async def _call(self, call: Callable[..., Result], *args: Any) -> Result:
        if self._ray is None:
            self._ray = await asyncio.get_running_loop().run_in_executor(self._calling, connect, self._target)
        return await asyncio.get_running_loop().run_in_executor(self._calling, call, *args)

    async def capacities(self) -> Mapping[str, Mapping[str, int]]:
        nodes = await self._call(self._nodes)
        found = {node["NodeID"]: capacities_of(node["Resources"]) for node in nodes if node["Alive"]}
        return {node_id: pools for node_id, pools in found.items() if pools}

    def _nodes(self) -> Sequence[Mapping[str, Any]]:
        nodes: Sequence[Mapping[str, Any]] = self._ray.nodes()
        return nodes

    async def reserve(self, pool: str, count: int, *, node_id: str = "") -> Reservation:
        creating = asyncio.ensure_future(self._call(self._create, pool, count, node_id))
        try:
            group = await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(self._free_created)
            raise
        held = Reservation("", group)
        loop = asyncio.get_running_loop()
        try:
            while not await loop.run_in_executor(self._waiting, group.wait, _WAIT_S):
                pass
            return Reservation(await self._call(self._node_of, group), group)
        except BaseException:
            self.free(held)
            raise

    def _create(self, pool: str, count: int, node_id: str) -> Any:
        from ray.util.placement_group import placement_group  # noqa: PLC0415

        bundle: dict[str, float] = {resource_of(pool): count}
        if node_id:
            (resources,) = [node["Resources"] for node in self._nodes() if node["NodeID"] == node_id] or [{}]
            # Older versions of Ray cannot name a node in another way. Many groups may use a little of it.
            bundle.update({name: 0.001 for name in resources if name.startswith(_NODE) and "__" not in name})
        # SPREAD: by default, groups of one machine would all be packed onto the same host.
        return placement_group([bundle], strategy="SPREAD" if count == 1 else "STRICT_PACK")

    @staticmethod
    def _node_of(group: Any) -> str:
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415

        nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return nodes.get(0, "")

    def _free_created(self, creating: "asyncio.Future[Any]") -> None:
        if not creating.cancelled() and creating.exception() is None:
            self.free(Reservation("", creating.result()))

    def free(self, reservation: Reservation) -> None:
        from ray.util.placement_group import remove_placement_group  # noqa: PLC0415

        def remove() -> None:
            # If the cluster is gone, so is the reservation.
            try:
                remove_placement_group(reservation.handle)
            except Exception as error:
                logger.warning("reservation %s: not freed: %s", reservation.handle.id, error)

        freeing = asyncio.get_running_loop().run_in_executor(self._calling, remove)
        self._freeing.add(freeing)
        freeing.add_done_callback(self._freeing.discard)

    async def report(self, node_id: str) -> HostReport:
        report: HostReport = await self._ask(node_id, "report")
        return report

    async def gather(self, node_id: str, client: str, ttl_s: float) -> bool:
        return bool(await self._ask(node_id, "gather", client, ttl_s))

    async def _ask(self, node_id: str, method: str, *args: Any) -> Any:
        """Call a method of a host's actor. Raises: Unavailable."""
        try:
            actor = self._actors.get(node_id)
            if actor is None:
                actor = self._actors[node_id] = await self._call(
                    lambda: self._ray.get_actor(actor_of(node_id), namespace=NAMESPACE)
                )
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                return await getattr(actor, method).remote(*args)
        except Exception as error:  # Ray raises ValueError, RayActorError and others
            self._actors.pop(node_id, None)
            message = str(error).partition("\n")[0] or type(error).__name__
            raise Unavailable(f"node {node_id}: its host actor does not answer: {message}", host=node_id) from error

    async def aclose(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                while self._freeing:
                    await asyncio.wait(self._freeing)
        # Episodes that end later are still freed, so `_calling` stays.
        self._waiting.shutdown(wait=False, cancel_futures=True)
