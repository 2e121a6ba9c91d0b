"""Start the actor of every KVM host of a Ray cluster, also of hosts that join later; drain and resume hosts."""

import logging
import threading
import time
from contextlib import suppress
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cuaenv.client.errors import Unavailable
from cuaenv.client.ray_cluster import NAMESPACE, actor_of, connect, host_nodes
from trainer.hosts.actor import HostActor, HostSettings

logger = logging.getLogger(__name__)

_SUPERVISOR: Final = "envd_hosts"
#: Of the process that an actor runs in, which is connected.
_OWN_CLUSTER: Final = "ray://auto"
_INTERVAL_S: Final = 2.0
_CALL_TIMEOUT_S: Final = 10.0
#: A new actor imports this package in a new process, which takes long on a busy node.
_START_TIMEOUT_S: Final = 120.0


class Supervisor:
    """A detached actor that keeps one `HostActor` on every node with machines."""

    def __init__(self, settings: HostSettings) -> None:
        """Begin at once: after Ray has restarted this actor, nothing else calls it."""
        self._settings = settings
        threading.Thread(target=self._keep, name="keep-hosts", daemon=True).start()

    def settings(self) -> HostSettings:
        return self._settings

    def _keep(self) -> None:
        while True:
            try:
                self._ensure()
            except Exception:  # the next look may succeed
                logger.exception("the hosts could not be examined")
            time.sleep(_INTERVAL_S)

    def _ensure(self) -> None:
        """Start missing actors and those of new nodes; remove those of nodes that have left."""
        nodes = {node["NodeID"]: node for node in host_nodes(_OWN_CLUSTER)}
        for node_id, node in nodes.items():
            actor = (
                ray.remote(HostActor)
                .options(
                    name=actor_of(node_id),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,
                    num_cpus=0,
                    max_concurrency=1000,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                .remote(node=node["NodeName"], ip=node["NodeManagerAddress"], settings=self._settings)
            )
            actor.configure.remote(self._settings)
            actor.report.remote()  # restarts its loop if Ray has restarted it
        prefix = actor_of("")
        for known in ray.util.list_named_actors(all_namespaces=True):
            name = known["name"]
            if known["namespace"] == NAMESPACE and name.startswith(prefix) and name.removeprefix(prefix) not in nodes:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def up(target: str, settings: HostSettings) -> None:
    """Start the supervisor, or replace one with other settings, and resume drained hosts. Raises: Unavailable."""
    connect(target)
    options = ray.remote(Supervisor).options(
        name=_SUPERVISOR, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, max_restarts=-1, num_cpus=0
    )
    until_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        supervisor = options.remote(settings)
        try:
            if _get(supervisor.settings.remote(), what="the supervisor", timeout_s=_START_TIMEOUT_S) == settings:
                break
            ray.kill(supervisor, no_restart=True)
        except Unavailable:  # its name is free only after it has ended
            if time.monotonic() > until_s:
                raise
        time.sleep(0.1)
    for node in host_nodes(target):
        with suppress(Unavailable):  # its actor starts now
            _get(_actor(node["NodeID"]).resume.remote(), what=f"node {node['NodeName']}")


def drain(target: str, name: str) -> None:
    """Begin to drain the host with this node name or id; its report says how far the drain is. Raises: Unavailable."""
    _get(_actor(_node_id(target, name)).drain.remote(), what=f"node {name}")


def resume(target: str, name: str) -> None:
    """End the drain of a host. Raises: Unavailable."""
    _get(_actor(_node_id(target, name)).resume.remote(), what=f"node {name}")


def _node_id(target: str, name: str) -> str:
    nodes = host_nodes(target)
    for node in nodes:
        if name in {node["NodeID"], node["NodeName"]}:
            return str(node["NodeID"])
    names = ", ".join(sorted(node["NodeName"] for node in nodes))
    raise Unavailable(f"node {name}: not found in the Ray cluster; its hosts are: {names or 'none'}")


def _actor(node_id: str) -> Any:
    try:
        return ray.get_actor(actor_of(node_id), namespace=NAMESPACE)
    except ValueError as error:
        raise Unavailable(f"node {node_id}: no host actor; run `trainer hosts up`") from error


def _get(ref: Any, *, what: str, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        message = str(error).partition("\n")[0]
        raise Unavailable(f"{what}: its actor does not answer: {message or type(error).__name__}") from error
