"""`envd serve`: runs a daemon until SIGTERM or SIGINT.

Standard output has one line for each event that people and scripts wait for; the log goes to standard error.
"""

import asyncio
import signal
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from cuaenv.cli.terminal import out
from envd.base.aio import race
from envd.base.config import DEFAULT_IMAGE, Config, PoolConfig
from envd.base.errors import HypervisorError
from envd.base.telemetry import logs
from envd.base.version import envd_version
from envd.cli.command import command
from envd.cli.options import EVERY_SETTING, config_options
from envd.daemon.composition import Daemon, open_daemon, read_inputs
from envd.daemon.process import ended_by_force, prepare_process
from envd.daemon.service_manager import ServiceManager
from envd.episodes.progress import EpisodeState
from envd.hypervisor.backends import backend_of
from envd.pool.backoff import BreakerState
from envd.pool.status import PoolStatus

#: Prints one line.
PrintLine = Callable[[str], None]

_PROBLEM_CHARS = 240
#: How long after the drain no machine may end before the process ends anyway. A supervisor waits longer.
_END_LIMIT_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@command(config_options(*EVERY_SETTING))
def serve(settings: Config) -> None:
    """Serve pools of desktops over gRPC. SIGTERM or Ctrl-C drains; a second signal ends all episodes."""
    logs.setup(log_format=settings.log_format, level=settings.log_level)
    if not settings.pools and not backend_of(settings.hypervisor.uri).capabilities.needs_images:
        settings = settings.model_copy(update={"pools": {DEFAULT_IMAGE: PoolConfig(image=DEFAULT_IMAGE, size=4)}})
    prepare_process()
    uvloop.run(serve_until_signal(settings, print_line=lambda line: out.print(line, markup=False, soft_wrap=True)))


async def serve_until_signal(config: Config, *, print_line: PrintLine) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises: see `open_daemon`."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        await _Serving(config=config, print_line=print_line, stop=stop, hurry=hurry, manager=ServiceManager()).run()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    print_line("stopped; nothing is left running")


@dataclass(slots=True, kw_only=True)
class _Serving:
    """One daemon, from start to shutdown."""

    config: Config
    print_line: PrintLine
    """Gets lines about its progress."""
    stop: asyncio.Event
    """Ends it, once set."""
    hurry: asyncio.Event
    """Ends its draining, once set."""
    manager: ServiceManager
    """Gets reports of its state."""
    _daemon: Daemon | None = None

    async def run(self) -> None:
        """Serve until `stop` is set, then destroy all machines. If it is set during start-up, cancel the start-up.

        Raises:
            HypervisorError: Machines could not be destroyed.
        """
        serving = asyncio.create_task(self._serve(), name="serve")
        await race(serving, self.stop)
        if self._daemon is None:
            serving.cancel()
        limit_s = self.config.limits.drain_timeout_s
        with ended_by_force(self._machine_ids, drain_s=limit_s, limit_s=_END_LIMIT_S):
            await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()
        if left := self._machine_ids():
            raise HypervisorError(
                f"machines {', '.join(left)}: could not be destroyed; the next start with this state directory removes"
                " them"
            )

    def _machine_ids(self) -> list[str]:
        return [] if self._daemon is None else self._daemon.machine_ids

    async def _serve(self) -> None:
        inputs = read_inputs(self.config)
        self.print_line(f"envd {envd_version()} is starting; its state is in {self.config.state_dir}")
        async with self.manager.watchdog(), open_daemon(self.config, inputs) as daemon:
            self._daemon = daemon
            self._announce_recovered(daemon)
            self._announce(daemon)
            self.manager.ready()
            reporting = asyncio.create_task(self._report_pools(daemon), name="serve:pools")
            try:
                await self.stop.wait()
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
            self.manager.stopping()
            live_count = len(daemon.service.list_episodes())
            limit_s = self.config.limits.drain_timeout_s
            self.print_line(
                f"draining: {live_count} live episodes have {limit_s:g} s to end; signal again to stop at once"
            )
            await daemon.drain(hurry=self.hurry)
            self.print_line("destroying machines")

    def _announce_recovered(self, daemon: Daemon) -> None:
        if daemon.reaped:
            what = "machine" if len(daemon.reaped) == 1 else "machines"
            self.print_line(f"removed {len(daemon.reaped)} {what} of an earlier daemon: {', '.join(daemon.reaped)}")
        if daemon.known:
            active_count = sum(info.progress.state is EpisodeState.ACTIVE for info in daemon.known)
            what = "episode" if len(daemon.known) == 1 else "episodes"
            self.print_line(
                f"{len(daemon.known)} {what} of an earlier daemon: {active_count} continue,"
                f" {len(daemon.known) - active_count} ended or were lost"
            )

    def _announce(self, daemon: Daemon) -> None:
        self.print_line(f"hypervisor: {daemon.hypervisor.description}")
        self.print_line(f"metrics on http://{daemon.metrics_address}/metrics")
        scheme = "http" if self.config.security.tls_cert is None else "https"
        if daemon.console_address:
            self.print_line(f"console on {scheme}://{daemon.console_address}/")
        for name, address in daemon.compat_addresses.items():
            self.print_line(f"protocol {name} on {scheme}://{address}")
        self.print_line(f"listening on {daemon.address}")

    async def _report_pools(self, daemon: Daemon) -> None:
        """Print the progress of each pool until its machines are ready for the first time."""
        begin_s = time.monotonic()
        printed: dict[str, str] = {}
        waiting = {name: pool.size for name, pool in self.config.pools.items()}
        async for infos in daemon.service.watch_pools():
            for info in infos:
                line = progress_line(info, size=waiting.get(info.name))
                if line and printed.get(info.name) != line:
                    printed[info.name] = line
                    if is_ready(info, size=self.config.pools[info.name].size):
                        del waiting[info.name]
                        line += f" after {time.monotonic() - begin_s:.0f} s"
                    self.print_line(line)
                    self.manager.status(line)
            if not waiting:
                return  # a busy pool changes at every reset and close


def is_ready(info: PoolStatus, *, size: int) -> bool:
    """Whether a pool has all of its machines ready or leased."""
    return info.idle_count + info.leased_count >= size


def progress_line(info: PoolStatus, *, size: int | None) -> str:
    """Return a line about a pool that starts `size` machines; empty if `size` is None: they were ready before."""
    if size is None:
        return ""
    if is_ready(info, size=size):
        return f"pool {info.name}: ready, {size} machines of image {info.image}"
    # libvirt's messages quote whole command lines; the log has the full text.
    problem = f"; {textwrap.shorten(info.problem, _PROBLEM_CHARS)}" if info.problem else ""
    ready_count = info.idle_count + info.leased_count
    if info.breaker is not BreakerState.CLOSED:
        return f"pool {info.name}: FAILING, no machine starts{problem}"
    if not ready_count and not info.template_digest:
        is_slow = info.accelerator == "tcg"
        duration = (
            "; without KVM one that is not stored yet boots for minutes, on a busy host for many" if is_slow else ""
        )
        return f"pool {info.name}: preparing the template that its machines are forked from{duration}{problem}"
    return f"pool {info.name}: {ready_count} of {size} machines ready, {info.starting_count} starting{problem}"
