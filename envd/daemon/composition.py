"""The composition root: creates every object of a daemon from its configuration and closes them in reverse order.

`envd serve` runs one until a signal; `envd demo` and `envd bench` run one in their own process.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from aiohttp.typedefs import Middleware

from envd.api.security.access import Scope
from envd.api.security.http import limit_rate, require_local_host_name, require_token, tls_context
from envd.api.security.secret_files import read_secret
from envd.api.server import ApiServer, read_token_table
from envd.base.aio import run_unless
from envd.base.clock import Clock, LoopLag
from envd.base.config import DEFAULT_RUN, CheckpointsConfig, Config
from envd.base.config_values import is_local
from envd.base.errors import ConfigError, OsworldError
from envd.base.store.store import FILE_NAME, SqliteStore
from envd.base.telemetry.endpoint import serve_metrics
from envd.base.telemetry.host import HostCollector
from envd.base.telemetry.metrics import Metrics
from envd.base.telemetry.traces import exported_traces
from envd.base.version import envd_version
from envd.console.server import PUBLIC_PATHS, serve_console
from envd.daemon.compat import local_socket_of, serve_compat
from envd.daemon.judging.workers import JudgeWorkers
from envd.daemon.state_lock import locked
from envd.daemon.suites import load_tasks
from envd.daemon.web import open_web
from envd.desktop.desktop import Desktop
from envd.desktop.gateway import Exit
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.progress import EpisodeStatus
from envd.episodes.recording.library import Library
from envd.episodes.recording.recorder import Recorder
from envd.episodes.recording.writer import RecordingDirectory
from envd.episodes.recovery import PersistedState, load_persisted
from envd.episodes.service import EpisodeService
from envd.hypervisor.backends import backend_of, open_hypervisor
from envd.hypervisor.machine import DiskImage, GuestOs, Hypervisor, LeftoverKind, Machine
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.bridge import WorkerBridge
from envd.integrations.osworld.catalogue import IMAGE
from envd.integrations.osworld.environment import Environment
from envd.integrations.osworld.workers import OsworldWorkers
from envd.pool.audit import Audit, stray_rows
from envd.pool.leased import LINGER_S
from envd.pool.machines import unregister_all
from envd.pool.pool import MachinePool
from envd.pool.room import HostClaims, HostRoom, host_memory_mib, read_available_bytes
from envd.pool.settings import PoolHost, PoolParameters
from envd.pool.status import POOL_SERIES
from envd.tasks.assets import AssetCache
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.evaluate import evaluate
from envd.tasks.setup import run_setup
from envd.tasks.setup_resources import SetupResources
from envd.tasks.user_model import UserModel

logger = logging.getLogger(__name__)

#: For responses in flight when serving ends, such as that of the last `Close`.
_STOP_GRACE = timedelta(seconds=2)
#: Longer than anything takes to be created or removed, including the largest template.
_AUDIT_GRACE_S = 300.0
_DEFAULT_SCREEN_PX = (1280, 800)


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A running daemon."""

    config: Config
    hypervisor: Hypervisor
    pools: tuple[MachinePool, ...]
    service: EpisodeService
    server: ApiServer
    address: str
    metrics_address: str
    console_address: str
    """Empty if the console is off."""
    compat_addresses: Mapping[str, str]
    """Addresses of other systems' protocols, by name."""
    reaped: tuple[str, ...]
    """Machines of a previous daemon that were removed at the start."""
    known: tuple[EpisodeStatus, ...]
    """Episodes of a previous daemon."""

    @property
    def machine_ids(self) -> list[str]:
        """Machines that exist, or may exist. Once it is closed: those that could not be destroyed."""
        return [machine_id for pool in self.pools for machine_id in pool.list_machine_ids()]

    async def drain(self, *, hurry: asyncio.Event) -> None:
        """Refuse new episodes and wait for live ones, for `limits.drain_timeout_s` or until `hurry` is set."""
        await self.server.drain()
        # What draining leaves undone is closing episodes; closing the daemon does that in any case.
        await run_unless(hurry, self.service.drain(self.config.limits.drain_timeout_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the settings name, read and checked before anything starts."""

    tasks: TaskCatalogue
    resources: SetupResources
    images: Mapping[str, tuple[DiskImage, tuple[int, int]]]
    """Image and (width, height) of its screen in pixels, by pool."""


def read_inputs(config: Config) -> Inputs:
    if not config.pools:
        raise ConfigError("no pool is configured; pass --pool 2, or add a section [pools.NAME] to the file")
    _check_memory(config)
    tasks = load_tasks(config)
    path = config.tasks.client_password_file
    password = read_secret(path, setting="tasks.client_password_file") if path else b""
    assets = AssetCache(config.asset_dir)
    assets.remove_leftovers()
    resources = SetupResources(
        assets=assets,
        allow_download=config.tasks.allow_download,
        client_password=password.decode(errors="replace").strip(),
    )
    return Inputs(tasks=tasks, resources=resources, images=dict(_images(config)))


@asynccontextmanager
async def open_daemon(config: Config, inputs: Inputs | None = None) -> AsyncIterator[Daemon]:
    """Run a daemon until the block ends; then every episode, machine and socket is gone.

    On failure nothing is left running.

    Raises:
        ConfigError: No pool is configured, the state directory is in use, an address is taken, or a task suite, token
            or certificate file is invalid.
        ImageNotFound, ImageError: A pool's image is missing or damaged.
        HypervisorError: libvirt cannot be opened.
    """
    inputs = inputs or read_inputs(config)
    metrics = Metrics(run_names=set(config.limits.runs) - {DEFAULT_RUN}, process=True)
    metrics.registry.register(_host_series(config))
    async with (
        open_store(config) as store,
        _serve_secured_metrics(metrics, config) as metrics_address,
        open_pools(config, inputs, store, metrics) as machines,
        open_episodes(config, inputs, store, metrics, machines) as service,
        # Listen first, so that no machine starts if the address is taken.
        open_endpoints(config, metrics, metrics_address, machines, service) as daemon,
    ):
        await service.start()
        yield daemon


@asynccontextmanager
async def open_store(config: Config) -> AsyncIterator[SqliteStore]:
    """Lock the state directory, export traces, and open the database. Raises: ConfigError."""
    with locked(config.state_dir):
        async with exported_traces(config.telemetry.otlp_endpoint):
            store = SqliteStore(config.state_dir / FILE_NAME)
            try:
                yield store
            finally:
                await store.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The hypervisor, the pools that fork machines on it, and what a previous daemon left."""

    hypervisor: Hypervisor
    pools: tuple[MachinePool, ...]
    persisted: PersistedState
    adopted: Mapping[str, Machine]
    """Machines of persisted episodes, by id."""
    reaped: tuple[str, ...]
    """All other machines of a previous daemon, which were removed."""


@asynccontextmanager
async def open_pools(config: Config, inputs: Inputs, store: SqliteStore, metrics: Metrics) -> AsyncIterator[Machines]:
    """Open the hypervisor, and create the pools, which start no machine yet. Raises: ConfigError, HypervisorError."""
    images = {name: image for name, (image, _) in inputs.images.items()}
    async with open_web(config, images, metrics) as exits, _opened(config, images.values()) as hypervisor:
        persisted = await load_persisted(store, clock=Clock(), pools=config.pools, tasks=inputs.tasks)
        adopted = await hypervisor.adopt(persisted.machine_ids)
        reaped = await hypervisor.reap()
        await unregister_all(store, adopted=adopted, reaped=reaped)
        with closing(HostClaims(config.cache_dir / "claims")) as claims:
            room = _room(config, runs_guests=hypervisor.capabilities.runs_guests, claims=claims)
            host = PoolHost(hypervisor=hypervisor, room=room, metrics=metrics, store=store)
            pools = tuple(_pools(config, inputs, host, exits=exits))
            metrics.build_info.labels(version=envd_version(), accelerator=hypervisor.accelerator.value).set(1)
            metrics.hypervisor_up.set_function(lambda: not hypervisor.problem)
            metrics.watch_pools(lambda: [(pool.name, pool.statistics()) for pool in pools], POOL_SERIES)
            yield Machines(
                hypervisor=hypervisor, pools=pools, persisted=persisted, adopted=adopted, reaped=tuple(reaped)
            )


@asynccontextmanager
async def _opened(config: Config, images: Collection[DiskImage]) -> AsyncIterator[Hypervisor]:
    """Open the hypervisor, and close it at the end. Raises: HypervisorError."""
    hypervisor = await open_hypervisor(config, images=list(images))
    try:
        logger.debug("hypervisor: %s", hypervisor.description)
        yield hypervisor
    finally:
        await hypervisor.close()


def _room(config: Config, *, runs_guests: bool, claims: HostClaims) -> HostRoom:
    # Fake desktops have no guest whose memory could grow: a host of 24 GiB would get 87 of them.
    if not runs_guests:
        return HostRoom()
    return HostRoom(
        memory_reserve_bytes=config.limits.memory_reserve_mib << 20,
        claims=claims,
        directory=config.state_dir,
        disk_reserve_bytes=config.limits.disk_reserve_mib << 20,
    )


def _pools(
    config: Config, inputs: Inputs, host: PoolHost, *, exits: Mapping[str, Exit | None]
) -> Iterator[MachinePool]:
    for name, pool in config.pools.items():
        if pool.parks and (reason := host.hypervisor.capabilities.not_forkable):
            raise ConfigError(f"pools.{name}.resident: its episodes cannot be parked: {reason}; remove the setting")
        image, image_screen_px = inputs.images[name]
        screen_px, web = pool.screen or image_screen_px, exits[name]
        yield MachinePool(
            PoolParameters(
                **{**dict(pool), "screen": screen_px},
                name=name,
                shares=config.limits.runs,
                linger_s=LINGER_S,
                trusted_authority=web.authority if web else "",
            ),
            image=image,
            host=host,
            make_desktop=partial(
                Desktop,
                web=web,
                screen_px=screen_px,
                has_powershell=image.os is GuestOs.WINDOWS,
                can_freeze=image.runs_linux,
            ),
        )


@asynccontextmanager
async def open_episodes(
    config: Config, inputs: Inputs, store: SqliteStore, metrics: Metrics, machines: Machines
) -> AsyncIterator[EpisodeService]:
    """Create the episode service, recover persisted episodes, and look for leftovers. Ends all episodes at the end."""
    async with AsyncExitStack() as stack:

        def run(work: Coroutine[Any, Any, None], name: str) -> None:
            stack.push_async_callback(_cancel, asyncio.create_task(work, name=name))

        judges = JudgeWorkers()
        stack.push_async_callback(judges.aclose)
        osworld = None
        if (workers := _osworld_workers(config)) is not None:
            stack.push_async_callback(workers.aclose)
            password = inputs.resources.client_password
            osworld = WorkerBridge(workers, assets=AssetCache(config.asset_dir), client_password=password)
        tokens = read_token_table(config.security, metrics)
        service = EpisodeService(
            machines.pools,
            tasks=inputs.tasks,
            run_setup=partial(run_setup, resources=replace(inputs.resources, bridge=osworld, judge=judges)),
            run_checkers=partial(evaluate, bridge=osworld, judge=judges),
            limits=config.limits,
            metrics=metrics,
            store=store,
            judge=judges,
            user_model=UserModel(config.tasks) if config.tasks.user_url else None,
            checkpoints=CheckpointStore(
                config.checkpoint_dir,
                settings=config.checkpoints,
                reserve_bytes=config.limits.disk_reserve_mib << 20,
                owners=lambda: tokens.get().owners if tokens else (),
            ),
            parked=CheckpointStore(
                config.state_dir / "parked",
                # As long as an episode, and as much as the disk has.
                settings=CheckpointsConfig(limit_gib=1_048_576, run_limit_gib=1_048_576),
                reserve_bytes=config.limits.disk_reserve_mib << 20,
                owners=lambda: tokens.get().owners if tokens else ("",),
                # Machines do not survive one either.
                survives_power_failure=False,
            ),
        )
        recording = config.recording
        if recording.directory is not None:
            target = RecordingDirectory(
                recording.directory,
                limit_bytes=int(recording.limit_gib * (1 << 30)),
                min_free_bytes=int(recording.min_free_gib * (1 << 30)),
            )
            failed = metrics.recording_failed
            recorder = Recorder(service, target, max_rate_hz=recording.max_rate_hz, on_failed=failed.set)
            # After the service, which closes the episodes.
            stack.push_async_callback(recorder.aclose)
        stack.push_async_callback(service.aclose)
        lag = LoopLag()
        lag.listen(metrics.loop_lag.observe)
        service.extend_leases_by(lag)
        run(lag.run(), "loop-lag")
        run(service.checkpoints.keep_swept(Clock()), "checkpoints")
        await service.recover(machines.persisted, machines.adopted)
        for kind in LeftoverKind:
            # Prometheus sees no increase in a series that begins at 1.
            metrics.leftovers.labels(kind=kind.value)
        audit = Audit(
            sources=[machines.hypervisor, *stray_rows(store, machines.pools, has_episode=service.journal.is_tracked)],
            interval_s=config.limits.audit_interval_s,
            grace_s=_AUDIT_GRACE_S,
            clock=Clock(),
            on_leftover=lambda leftover: metrics.leftovers.labels(kind=leftover.kind.value).inc(),
        )
        run(audit.run(), "audit")
        if workers is not None and any(pool.image == IMAGE for pool in config.pools.values()):
            run(_warm(workers), "osworld:warm")
        yield service


@asynccontextmanager
async def open_endpoints(
    config: Config, metrics: Metrics, metrics_address: str, machines: Machines, service: EpisodeService
) -> AsyncIterator[Daemon]:
    """Listen for clients. Raises: ConfigError: an address is taken, or a token or certificate file is invalid."""
    # Before clients can open others.
    known = tuple(service.list_episodes())
    async with AsyncExitStack() as stack:
        local_socket = local_socket_of(config)
        server = ApiServer(
            service, listen=config.listen, metrics=metrics, security=config.security, local_socket=local_socket
        )
        stack.push_async_callback(server.stop, grace=_STOP_GRACE)
        tls = tls_context(config.security, on_stale=metrics.security_files_stale.labels(setting="tls_cert").set)
        is_open = config.security.tokens_file is None and tls is None
        local_only = [require_local_host_name()] if is_open else []
        console_address = ""
        if config.console_listen:
            tokens = read_token_table(config.security, metrics)
            checks = [limit_rate(server.guard), require_token(tokens, Scope.READ, exempt=PUBLIC_PATHS)]
            console_address = await stack.enter_async_context(_serve_console(service, checks + local_only, tls, config))
        address = await server.start()
        compat_addresses: Mapping[str, str] = {}
        if local_socket is not None:
            compat_addresses = await stack.enter_async_context(serve_compat(config, f"unix:{local_socket}"))
        yield Daemon(
            config=config,
            hypervisor=machines.hypervisor,
            pools=machines.pools,
            service=service,
            server=server,
            address=address,
            metrics_address=metrics_address,
            console_address=console_address,
            compat_addresses=compat_addresses,
            reaped=machines.reaped,
            known=known,
        )


def _serve_secured_metrics(metrics: Metrics, config: Config) -> AbstractAsyncContextManager[str]:
    """Serve metrics: to every process on loopback, to others by the rules of `security`."""
    if is_local(config.metrics_listen):
        return serve_metrics(metrics, config.metrics_listen)
    tls = tls_context(config.security, on_stale=metrics.security_files_stale.labels(setting="tls_cert").set)
    tokens = read_token_table(config.security, metrics)
    check = require_token(tokens, Scope.READ, exempt=["/healthz"])
    return serve_metrics(metrics, config.metrics_listen, tls=tls, middlewares=[check])


def _serve_console(
    service: EpisodeService, checks: Sequence[Middleware], tls: ssl.SSLContext | None, config: Config
) -> AbstractAsyncContextManager[str]:
    """Serve the console by the rules of `security`, on loopback too."""
    directory = config.recording.directory
    library = None if directory is None else Library(directory)
    return serve_console(service, config.console_listen, library=library, tls=tls, middlewares=checks)


def _host_series(config: Config) -> HostCollector:
    """Return the series of the directories that fill up, and of the certificates that expire."""
    directories = {
        "state": config.state_dir,
        "cache": config.cache_dir,
        "templates": config.hypervisor.template_dir,
        "template_memory": config.hypervisor.template_memory_dir,
    }
    certificates = {"tls_cert": config.security.tls_cert, "client_ca": config.security.client_ca}
    return HostCollector(
        directories={name: path for name, path in directories.items() if path is not None},
        certificates={name: path for name, path in certificates.items() if path is not None},
        memory=read_available_bytes,
    )


def _osworld_workers(config: Config) -> OsworldWorkers | None:
    """Return the workers that run OSWorld's code, not yet started; None if it is not installed or guests are fake."""
    environment = Environment(config.cache_dir)
    runs_guests = backend_of(config.hypervisor.uri).capabilities.runs_guests
    return OsworldWorkers(environment.python) if runs_guests and environment.is_installed else None


async def _warm(workers: OsworldWorkers) -> None:
    """Import OSWorld before the first episode needs it."""
    try:
        await workers.start()
    except OsworldError as error:
        logger.warning("resets of OSWorld's tasks will fail: %s", error)


def _check_memory(config: Config) -> None:
    """Refuse guests that no amount of free memory would let QEMU start. Raises: ConfigError."""
    if not backend_of(config.hypervisor.uri).capabilities.runs_guests:
        return
    host_mib = host_memory_mib()
    for name, pool in config.pools.items():
        if pool.memory_mib > host_mib:
            raise ConfigError(
                f"pools.{name}.memory_mib: {pool.memory_mib} is more than the host's {host_mib} MiB; lower it"
            )


def _images(config: Config) -> Iterator[tuple[str, tuple[DiskImage, tuple[int, int]]]]:
    """Yield each pool's image and its screen's (width, height) in pixels. Raises: ImageNotFound, ImageError."""
    if (stand_in := backend_of(config.hypervisor.uri).capabilities.stand_in_image) is not None:
        for name, pool in config.pools.items():
            yield name, (replace(stand_in, name=pool.image), _DEFAULT_SCREEN_PX)
        return
    catalogue = ImageCatalogue(config.cache_dir)
    for name, pool in config.pools.items():
        image = catalogue.get(pool.image)
        yield name, (catalogue.disk_image(pool.image), (image.screen_width_px, image.screen_height_px))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
