"""The Ray actor of one KVM host: starts or adopts its daemon, probes it, restarts it, drains it, and reports on it."""

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from cuaenv.client import AsyncEnvClient, EnvError, Pool, Tls
from cuaenv.client.ray_cluster import HostReport
from trainer.hosts.daemon import DaemonProcess

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
_PROBE_TIMEOUT: Final = timedelta(seconds=5)
_MAX_PAUSE_S: Final = 30.0
#: A daemon that ran for this long starts again without a pause.
_STEADY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """How every host runs its daemon. `{node}` and `{ip}` stand for the node's name and address."""

    command: tuple[str, ...] = ()
    """Starts the daemon; empty if something else runs it, such as systemd."""
    endpoint: str = ""
    """HOST:PORT for clients; empty for the address that the daemon prints. Mandatory without a command."""
    ca_file: str = ""
    """File on the host with the daemon's certificate authority, PEM; empty for clear text on loopback."""
    directory: str = "~/.local/state/envd-hosts/{node}"
    """Directory on the host for the daemon's pid, output and log."""

    def on(self, *, node: str, ip: str) -> "HostSettings":
        def fill(text: str) -> str:
            return text.replace("{node}", node).replace("{ip}", ip)

        return HostSettings(
            command=tuple(map(fill, self.command)),
            endpoint=fill(self.endpoint),
            ca_file=self.ca_file,
            directory=os.path.expanduser(fill(self.directory)),
        )


class HostActor:
    """The daemon of one node. Its methods are called by clients, by the supervisor and by `trainer hosts`."""

    def __init__(self, *, node: str, ip: str, settings: HostSettings) -> None:
        """Prepare; the first call starts to run the daemon, so that every call finds a running loop."""
        self._ip = ip
        self._settings = settings.on(node=node, ip=ip)
        self._daemon = DaemonProcess(Path(self._settings.directory))
        # Survives this actor: a drain continues after it was restarted.
        self._drain_mark = Path(self._settings.directory) / "draining"
        self._report = HostReport(node=node, state="starting")
        self._client: AsyncEnvClient | None = None
        self._client_key = ("", "")
        self._pause_s = 0.0
        self._started_s = float("-inf")
        self._running: asyncio.Task[None] | None = None

    async def report(self) -> HostReport:
        self._run()
        if self._drain_mark.exists() and self._report.state not in {"draining", "drained"}:
            return replace(self._report, state="draining")
        return self._report

    async def configure(self, settings: HostSettings) -> None:
        """Use other settings from the next start of the daemon on."""
        self._settings = settings.on(node=self._report.node, ip=self._ip)

    async def drain(self) -> None:
        """Let no new episodes begin; stop the daemon when the last one has ended. See `report` for the progress."""
        self._drain_mark.touch()
        self._run()

    async def resume(self) -> None:
        """End a drain: start the daemon if it was stopped."""
        self._drain_mark.unlink(missing_ok=True)
        self._pause_s, self._started_s = 0.0, float("-inf")
        self._run()

    def _run(self) -> None:
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._keep(), name="keep-daemon")

    async def _keep(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as error:  # the next look may succeed
                logger.exception("%s: the daemon could not be examined", self._report.node)
                self._report = replace(self._report, state="down", problem=str(error))
            await asyncio.sleep(_INTERVAL_S)

    async def _look(self) -> None:
        """Start the daemon if it should run and does not; probe it; stop it at the end of a drain."""
        is_draining, has_command = self._drain_mark.exists(), bool(self._settings.command)
        pid = self._daemon.pid if has_command else 0
        if has_command and not pid:
            if is_draining:
                self._note("drained", problem="", pid=0)
            else:
                await self._start()
            return
        pools, problem = await self._probe()
        if problem:
            self._note("starting" if self._report.state == "starting" else "down", problem=problem, pid=pid)
        elif not is_draining:
            self._note("up", problem="", pid=pid, pools=pools)
        elif any(pool.leased_count or pool.waiting_count for pool in pools):
            self._note("draining", problem="", pid=pid, pools=pools)
        else:
            self._daemon.stop()
            self._note("draining" if has_command else "drained", problem="", pid=pid, pools=pools)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s < self._started_s + self._pause_s:
            return
        ran_s = now_s - self._started_s
        self._pause_s = 0.0 if ran_s > _STEADY_S else min(_MAX_PAUSE_S, max(1.0, 2 * self._pause_s))
        self._started_s = now_s
        problem = "" if self._report.state == "starting" else f"the daemon ended: {self._daemon.last_words}"
        if problem:
            logger.warning("%s: %s; it is started again", self._report.node, problem)
        await asyncio.to_thread(self._daemon.start, self._settings.command, environ=os.environ)
        self._note("starting", problem=problem, pid=self._daemon.pid)

    async def _probe(self) -> tuple[list[Pool], str]:
        """Return the daemon's pools and its problem, empty if it answers."""
        endpoint = self._settings.endpoint or self._daemon.address
        if not endpoint:
            return [], f"the daemon does not listen yet: {self._daemon.last_words}"
        host, _, port = endpoint.rpartition(":")
        if host in {"0.0.0.0", "[::]"}:  # noqa: S104 -- recognised, not listened on
            endpoint = f"{self._ip}:{port}"
        ca = ""
        if self._settings.ca_file:
            ca = await asyncio.to_thread(Path(self._settings.ca_file).expanduser().read_text)
        if (endpoint, ca) != self._client_key:
            await self._close_client()
            tls = Tls(ca=Path(self._settings.ca_file).expanduser()) if ca else None
            self._client, self._client_key = AsyncEnvClient(endpoint, tls=tls), (endpoint, ca)
            self._report = replace(self._report, endpoint=endpoint, ca=ca)
        assert self._client is not None  # noqa: S101 -- for mypy
        try:
            return await self._client.list_pools(timeout=_PROBE_TIMEOUT), ""
        except EnvError as error:
            return [], str(error)

    async def _close_client(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            with suppress(EnvError):
                await client.aclose()

    def _note(self, state: str, *, problem: str, pid: int, pools: list[Pool] | None = None) -> None:
        if state != self._report.state:
            logger.info("%s: %s -> %s %s", self._report.node, self._report.state, state, problem)
        self._report = replace(self._report, state=state, problem=problem, pid=pid)
        if pools is not None:
            self._report = replace(
                self._report,
                leased_count=sum(pool.leased_count for pool in pools),
                waiting_count=sum(pool.waiting_count for pool in pools),
            )
