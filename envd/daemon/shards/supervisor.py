"""The supervisor: starts the shards, restarts those that end unexpectedly, and chooses one for each new group.

Clients call the shards, which share a port. A shard passes on to the supervisor what it cannot serve alone: resets,
lists, and calls for other shards' episodes. The supervisor has no machines: if it is killed, the kernel kills its
shards, and the next start recovers their state as after any crash.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from envd.api.relay.link import ShardLink
from envd.api.relay.placements import Placements
from envd.api.relay.servicer import RelayServicer
from envd.api.server import ApiServer, check_security, parse_listen
from envd.base.aio import Changes, race
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.base.telemetry.merge import merge_series
from envd.base.telemetry.metrics import Metrics
from envd.base.telemetry.traces import exported_traces
from envd.base.version import envd_version
from envd.daemon.composition import serve_secured_metrics
from envd.daemon.shards.layout import (
    INNER_SECURITY,
    call_socket,
    clear_layout,
    growth_file,
    mark_layout,
    metrics_socket,
    require_divisible,
    supervisor_socket,
)
from envd.daemon.shards.port import reserved_port
from envd.daemon.shards.process import ShardProcess
from envd.daemon.state_lock import locked
from envd.pool.memory import GrowthBoard

logger = logging.getLogger(__name__)

#: For responses in flight when serving ends.
_STOP_GRACE: Final = timedelta(seconds=2)
#: A shard that ends soon after its start is restarted after a pause, which doubles up to this.
_MAX_PAUSE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 1.0
_SCRAPE_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
_SUPERVISOR: Final = "supervisor"

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """A running supervisor with its shards."""

    server: ApiServer
    address: str
    """Address for clients."""
    metrics_address: str
    shards: "tuple[SupervisedShard, ...]"

    async def drain(self, *, hurry: asyncio.Event) -> None:
        """Let all shards drain and end. Once `hurry` is set, they end all episodes at once."""
        await self.server.drain()
        ends = asyncio.gather(*(shard.stop() for shard in self.shards))
        await race(ends, hurry)
        if not ends.done():
            for shard in self.shards:
                shard.hurry()
        await ends


@dataclass(slots=True)
class SupervisedShard:
    """A shard that is restarted when it ends, until `stop`."""

    index: int
    link: ShardLink
    settings: Mapping[str, object]
    print_line: PrintLine
    on_up: Callable[[bool], None]
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it served for the first time."""
    process: ShardProcess | None = None
    ended_cleanly: bool = False
    """Whether its last process ended with status 0: it left no machines."""
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def supervise(self) -> None:
        """Run the shard until `stop`. Raises: ConfigError: it ends before it serves for the first time."""
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._stopping.is_set():
                process = self.process = ShardProcess(self.index, self.settings, print_line=self.print_line)
                try:
                    status = await self._run(process)
                except OSError as error:
                    logger.warning("shard %d: could not be started: %s", self.index, error)
                    status = 1
                self.ended_cleanly = status == 0
                if self._stopping.is_set():
                    return
                if not self.serving.is_set():
                    raise ConfigError(f"shard {self.index}: ended with status {status} before it served; see its log")
                pause_s = _FIRST_PAUSE_S if process.ready.is_set() else min(2 * pause_s, _MAX_PAUSE_S)
                logger.error("shard %d: ended with status %d; restarting in %g s", self.index, status, pause_s)
                self.print_line(f"shard {self.index}: ended unexpectedly; restarting it")
                sleeping = asyncio.ensure_future(asyncio.sleep(pause_s))
                await race(sleeping, self._stopping)
                sleeping.cancel()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Let the shard drain, and wait until it has ended."""
        self._stopping.set()
        if self.process is not None:
            self.process.stop()
        await self._ended.wait()

    def hurry(self) -> None:
        """Let a shard that drains end all of its episodes."""
        if self.process is not None:
            self.process.stop()

    async def _run(self, process: ShardProcess) -> int:
        running = asyncio.create_task(process.run(), name=f"shard:{self.index}")
        try:
            await race(running, process.ready)
            if not running.done():
                connecting = asyncio.create_task(self.link.connect(), name=f"shard:{self.index}:connect")
                await asyncio.wait({connecting, running}, return_when=asyncio.FIRST_COMPLETED)
                if connecting.done():
                    self.on_up(True)
                    self.serving.set()
                await asyncio.wait({running})
                connecting.cancel()
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})
            self.on_up(False)
            await self.link.disconnect()


@asynccontextmanager
async def open_supervisor(config: Config, *, print_line: PrintLine) -> AsyncIterator[Supervisor]:
    """Run a supervisor and its shards until the block ends; then every episode, machine and socket is gone.

    Raises:
        ConfigError: Shards cannot serve the configuration, the state directory is in use, an address is taken, or a
            shard does not start.
        StoreError: The file of placements is unusable.
    """
    require_divisible(config)
    metrics = Metrics(process=True)
    # The shards read them too; this one reports what is wrong with them before anything starts.
    check_security(config.security, metrics, allow_quotas=False)
    metrics.build_info.labels(version=envd_version(), accelerator="").set(1)
    changes = Changes()
    async with AsyncExitStack() as stack:
        stack.enter_context(locked(config.state_dir))
        await stack.enter_async_context(exported_traces(config.telemetry.otlp_endpoint))
        placements = Placements(config.state_dir / "placements")
        stack.callback(placements.close)
        address = stack.enter_context(
            reserved_port(parse_listen(config.listen, exposable=config.security.is_exposable))
        )
        whole = config.model_copy(update={"listen": address})
        shards = tuple(_shard(whole, index, metrics, changes, print_line) for index in range(config.shards))
        relay = RelayServicer([shard.link for shard in shards], placements, changes=changes)
        server = ApiServer(
            relay, listen=f"unix:{supervisor_socket(config)}", metrics=metrics, security=INNER_SECURITY, is_inner=True
        )
        merge = partial(_with_shards, config=config)
        metrics_address = await stack.enter_async_context(serve_secured_metrics(metrics, config, merge=merge))
        mark_layout(config.state_dir, count=config.shards)
        GrowthBoard.create(growth_file(config.state_dir), shard_count=config.shards)
        stack.push_async_callback(server.stop, grace=_STOP_GRACE)
        await server.start()
        supervising = [
            asyncio.create_task(shard.supervise(), name=f"shard:{shard.index}:supervise") for shard in shards
        ]
        stack.push_async_callback(_end, config, shards, supervising)
        await _served(shards, supervising)
        yield Supervisor(server=server, address=address, metrics_address=metrics_address, shards=shards)


def _shard(config: Config, index: int, metrics: Metrics, changes: Changes, print_line: PrintLine) -> SupervisedShard:
    up = metrics.shard_up.labels(shard=str(index))
    return SupervisedShard(
        index=index,
        link=ShardLink(index, f"unix:{call_socket(config, index)}", on_change=changes.notify),
        settings={"config": config.model_dump(mode="json"), "index": index},
        print_line=print_line,
        on_up=up.set,
    )


async def _served(shards: Sequence[SupervisedShard], supervising: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all shards serve. Raises: ConfigError: one ended before."""
    all_serve = asyncio.gather(*(shard.serving.wait() for shard in shards))
    waits: list[asyncio.Future[Any]] = [all_serve, *supervising]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not all_serve.done():
        all_serve.cancel()
        await asyncio.gather(all_serve, return_exceptions=True)
        for task in supervising:
            if task.done():
                task.result()


async def _end(config: Config, shards: Sequence[SupervisedShard], supervising: Sequence[asyncio.Task[None]]) -> None:
    """End all shards and their episodes."""
    for shard in shards:
        shard.hurry()
    ends = [shard.stop() for shard in shards]
    await asyncio.gather(*ends)
    await asyncio.wait(supervising)
    if all(shard.ended_cleanly for shard in shards):
        clear_layout(config.state_dir)


async def _with_shards(body: bytes, *, config: Config) -> bytes:
    """Return the series of this process and of all shards that answer."""
    bodies = await asyncio.gather(*(_scraped(metrics_socket(config, index)) for index in range(config.shards)))
    found = {str(index): each for index, each in enumerate(bodies) if each is not None}
    return await asyncio.to_thread(merge_series, {_SUPERVISOR: body} | found)


async def _scraped(socket: Path) -> bytes | None:
    connector = aiohttp.UnixConnector(str(socket))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=_SCRAPE_TIMEOUT) as session,
            session.get("http://shard/metrics") as response,
        ):
            return await response.read()
    except (OSError, TimeoutError, aiohttp.ClientError) as error:
        # `envd_shard_up` reports it too.
        logger.debug("%s: not scraped: %s", socket, error)
        return None
