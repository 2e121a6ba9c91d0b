"""A Ray cluster on this machine: a head and several raylets, each with a daemon of drawn desktops of its own."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Time to start and to answer on a busy machine. Ray reads these when it is imported, and in its processes.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_raylet_start_wait_time_s="300",
    RAY_agent_register_timeout_ms="300000",
    RAY_worker_register_timeout_seconds="300",
    # Of one probe. A process that has ended refuses the connection, and is found at once.
    RAY_health_check_timeout_ms="60000",
    RAY_gcs_rpc_server_reconnect_timeout_s="20",
)

import ray
from ray.cluster_utils import Cluster

from cuaenv.client.ray_cluster import HostReport, NodeStatus, status
from trainer.hosts.actor import HostSettings
from trainer.hosts.supervisor import up

_TIMEOUT_S = 300.0
_STORE_BYTES = 80 << 20
CONFIG = """\
listen = "127.0.0.1:0"
metrics_listen = "127.0.0.1:0"

[hypervisor]
uri = "fake"

[pools.desktop]
image = "desktop"
size = {capacity}
capacity = {capacity}

[limits]
lease_ttl_s = 10
"""
#: Arguments: the cluster, and the size of its groups.
_TRAINER = """
import asyncio, sys
from datetime import timedelta
from cuaenv.client import AsyncEnvClient, Click, Done, EnvError, View

async def main():
    async with AsyncEnvClient(sys.argv[1]) as client:
        while True:
            try:
                async with client.reset_group(
                    "fake/count-to-five",
                    size=int(sys.argv[2]),
                    view=View(encoding="none"),
                    lease_ttl=timedelta(seconds=10),
                ) as group:
                    for _ in range(5):
                        for episode in group:
                            await episode.step(Click(x=819, y=100), timeout=timedelta(seconds=15))
                    for episode in group:
                        await episode.step(Done(), timeout=timedelta(seconds=15))
                    for episode in group:
                        score = await episode.evaluate(timeout=timedelta(seconds=15))
                        print("score", score.score, flush=True)
            except EnvError as error:
                print("void", type(error).__name__, flush=True)

asyncio.run(main())
"""


class RayHosts:
    """A cluster whose hosts are started and ended one by one."""

    def __init__(self, directory: Path, *, capacity: int, config: str = CONFIG) -> None:
        """Start the head alone, and connect this process to it."""
        self._directory = directory
        self._capacity = capacity
        self._nodes: dict[str, Any] = {}
        file = directory / "envd.toml"
        file.write_text(config.format(capacity=capacity))
        envd = (sys.executable, "-m", "envd", "serve", "--config", str(file))
        self.settings = HostSettings(
            command=(*envd, "--state-dir", f"{directory}/state-{{node}}"), directory=f"{directory}/host-{{node}}"
        )
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 8, "object_store_memory": _STORE_BYTES, "include_dashboard": False},
        )
        self.target = f"ray://{self.cluster.address}"

    def add(self, name: str) -> None:
        """Add a host. Only in the main thread: Ray sets a signal handler."""
        self._nodes[name] = self.cluster.add_node(
            num_cpus=0, node_name=name, object_store_memory=_STORE_BYTES, resources={"envd_desktop": self._capacity}
        )

    def kill_raylet(self, name: str) -> None:
        """Kill a host's raylet, not its daemon."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def kill_daemon(self, name: str) -> int:
        """Kill a host's daemon; return its pid."""
        pid = self.report(name).pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def is_running(self, pid: int) -> bool:
        """Return whether a process runs."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def up(self) -> None:
        """Start the hosts' daemons, and wait until all are up."""
        up(self.target, self.settings)
        self.wait(lambda: len(self.up_names()) == len(self._nodes))

    def up_names(self) -> Sequence[str]:
        """Return the names of the hosts that are up."""
        return [node.report.node for node in self.status() if node.report.state == "up"]

    def status(self) -> list[NodeStatus]:
        """Return the state of all hosts."""
        return status(self.target)

    def report(self, name: str) -> HostReport:
        """Return a host's report."""
        return next(node.report for node in self.status() if node.report.node == name)

    def leased(self) -> int:
        """Return the leased machines of all hosts."""
        return sum(node.report.leased_count for node in self.status())

    def actor_pids(self) -> set[int]:
        """Return the processes of the hosts' actors and of their supervisor."""
        known = ray._private.state.actors().values()
        return {one["Pid"] for one in known if one["State"] == "ALIVE" and one["Name"].startswith("envd_host")}

    def kill_actors(self) -> set[int]:
        """Kill all of them; return their processes."""
        pids = self.actor_pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def kill_one(self, kind: str, rng: random.Random) -> None:
        """Kill a random process: a daemon, one of its helpers, or an actor."""
        pids: set[int] = set()

        def has_found() -> bool:
            nonlocal pids
            match kind:
                case "actor":
                    pids = self.actor_pids()
                case "daemon":
                    pids = self.daemon_pids()
                case _:
                    pids = {child for pid in self.daemon_pids() for child in _children(pid)}
            return bool(pids)

        self.wait(has_found)
        with suppress(ProcessLookupError):
            os.kill(rng.choice(sorted(pids)), signal.SIGKILL)

    def kill_head(self) -> None:
        """Kill the head's processes, and wait until the hosts' raylets have ended for want of a head."""
        ray.shutdown()  # or Ray would end this process, too
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        raylets = [node.all_processes["raylet"][0].process for node in self._nodes.values()]
        self.wait(lambda: all(raylet.poll() is not None for raylet in raylets))

    def daemon_pids(self) -> set[int]:
        """Return the daemons that run on this cluster's directories, of whatever parent."""
        found = set()
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (directory / "cmdline").read_bytes().split(b"\0")
                is_ours = str(self._directory / "envd.toml").encode() in words and b"sh" not in words[:1]
                if is_ours and self.is_running(int(directory.name)):
                    found.add(int(directory.name))
        return found

    async def start_trainer(self, *, size: int) -> asyncio.subprocess.Process:
        """Start a process that opens groups of drawn desktops and prints lines `score 1.0`, until it is ended."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TRAINER, self.target, str(size), stdout=asyncio.subprocess.PIPE
        )

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true."""
        until_s = time.monotonic() + _TIMEOUT_S
        while not condition():
            assert time.monotonic() < until_s, self.status()
            time.sleep(0.1)

    def end_cluster(self) -> None:
        """End this process's connection, the raylets and the head; the daemons stay."""
        ray.shutdown()
        self.cluster.shutdown()

    def close(self) -> None:
        """End the daemons, this process's connection and the cluster."""
        self.end_cluster()
        for pid in self.daemon_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found
