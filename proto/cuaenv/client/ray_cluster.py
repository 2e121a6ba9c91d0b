"""The Ray cluster that the KVM hosts have joined, and what each host reports.

The only module of the client that imports Ray. A host is a node with one custom resource per pool, `envd_POOL`, whose
amount is the pool's capacity, and with a named actor that reports the daemon's endpoint (`actor_of`; see
`trainer.hosts`). Ray places no episodes: clients choose among the hosts that are up (`targets.resolve`).
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final

from cuaenv.client.errors import Unreachable

#: Namespace of the hosts' actors in the Ray cluster.
NAMESPACE: Final = "envd"
_PREFIX: Final = "envd_"
_SCHEME: Final = "ray://"
_REPORT_TIMEOUT_S: Final = 5.0
_connecting = threading.Lock()


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
    leased_count: int = 0
    waiting_count: int = 0
    pid: int = 0
    """Process of the daemon; 0 if it was not started by the actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A host in the cluster."""

    node_id: str
    capacity: Mapping[str, int]
    """Machines by pool."""
    report: HostReport


def capacities_of(resources: Mapping[str, float]) -> dict[str, int]:
    return {name.removeprefix(_PREFIX): int(amount) for name, amount in resources.items() if name.startswith(_PREFIX)}


def connect(target: str) -> Any:
    """Connect this process to a target's cluster, unless it is connected, and return the module `ray`.

    Raises:
        Unreachable: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray  # noqa: PLC0415 -- only users of ray:// have it
    except ImportError as error:
        raise Unreachable(f"{target}: Ray is not installed; install `envd-trainer[ray]`", host=target) from error
    with _connecting:
        if not ray.is_initialized():
            try:
                ray.init(address=target.removeprefix(_SCHEME), namespace=NAMESPACE, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise Unreachable(f"{target}: no Ray cluster can be reached: {error}", host=target) from error
    return ray


def host_nodes(target: str) -> list[dict[str, Any]]:
    """Return Ray's description of the live nodes that have machines. Blocks. Raises: Unreachable."""
    ray = connect(target)
    try:
        nodes = ray.nodes()
    except Exception as error:  # of Ray, whose errors are many
        raise Unreachable(f"{target}: the Ray cluster does not answer: {_first_line(error)}", host=target) from error
    return [node for node in nodes if node["Alive"] and capacities_of(node["Resources"])]


def status(target: str) -> list[NodeStatus]:
    """Return the state of all hosts; one whose actor is silent for 5 s is down. Blocks. Raises: Unreachable."""
    nodes = host_nodes(target)
    asked = [_ask(connect(target), node["NodeID"]) for node in nodes]
    wait(asked, _REPORT_TIMEOUT_S)
    return [
        NodeStatus(
            node_id=node["NodeID"], capacity=capacities_of(node["Resources"]), report=_report_of(node["NodeName"], one)
        )
        for node, one in zip(nodes, asked, strict=True)
    ]


def _ask(ray: Any, node_id: str) -> "Future[HostReport]":
    try:
        # Not `ray.get`, which warns in each asyncio actor, even in a thread of its own.
        asked: Future[HostReport] = ray.get_actor(actor_of(node_id), namespace=NAMESPACE).report.remote().future()
    except Exception as error:  # ValueError: there is no such actor; and others
        asked = Future()
        asked.set_exception(error)
    return asked


def _report_of(node: str, asked: "Future[HostReport]") -> HostReport:
    try:
        return asked.result(0.0)
    except Exception as error:  # RayActorError, TimeoutError and others
        problem = f"its host actor does not answer: {_first_line(error)}; run `trainer hosts up`"
        return HostReport(node=node, state="down", problem=problem)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
