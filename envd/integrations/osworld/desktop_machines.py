"""Episodes as machines of OSWorld's `DesktopEnv`; `envd.integrations.osworld.provider` registers them."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from cuaenv.client import EnvClient, EnvError, Episode, Tls, View
from envd.integrations.osworld import DESKTOP_TASK

#: Ports of the guest that DesktopEnv uses: OSWorld's service, Chrome's DevTools and VLC's HTTP interface. OSWorld's
#: tasks start Chrome on port 1337 and forward port 9222 to it in the guest.
_GUEST_PORTS = (5000, 9222, 8080)
#: DesktopEnv also expects this port, on which nothing listens: it is for people.
_VNC_PORT = 8006

_LEASE = timedelta(minutes=10)
_RESET_TIMEOUT = timedelta(minutes=15)
_COMMAND_TIMEOUT = timedelta(minutes=2.5)
_NO_PIXELS = View(encoding="none")

logger = logging.getLogger(__name__)


class ProviderError(RuntimeError):
    """A call to the daemon failed; the message names the daemon and the cause in one line."""


@dataclass(slots=True)
class _Machine:
    """An open episode, and the local ports that lead to its guest."""

    episode: Episode
    held: ExitStack
    ports: list[int] = field(default_factory=list)


class EnvdProvider:
    """Provider and manager of machines for `DesktopEnv`; holds at most one machine, and the saved states.

    Args:
        address: Of the daemon, HOST:PORT.
        pool: Empty for the only one that fits.
        token: By default the variable `ENVD_TOKEN`. Never sent to another host in clear text.
        tls: Files for an encrypted connection; None for clear text.
    """

    def __init__(self, address: str, *, pool: str = "", token: str | None = None, tls: Tls | None = None) -> None:
        self._address = address
        self._pool = pool
        self._token = token
        self._tls = tls
        self._client: EnvClient | None = None
        self._machine: _Machine | None = None
        self._snapshots: dict[str, _Machine] = {}

    def __repr__(self) -> str:
        machine = self._machine.episode.episode_id if self._machine else "without a machine"
        return f"<EnvdProvider {self._address} {machine}>"

    def start_emulator(self, path_to_vm: str, headless: bool, os_type: str = "") -> None:  # noqa: ARG002
        """Create a machine, unless one exists.

        Raises:
            ProviderError: It could not be created, or its pool does not allow access to its guests.
        """
        if self._machine is not None:
            return
        try:
            with self._errors():
                self._start(self._reset())
                self._check_pool(self._current.episode)
        except ProviderError:
            self.stop_emulator("")
            raise

    def get_ip_address(self, path_to_vm: str) -> str:  # noqa: ARG002
        """Return `host:server:chromium:vnc:vlc` of the present machine; all ports but that of VNC lead to its guest."""
        server, chromium, vlc = self._current.ports
        return f"127.0.0.1:{server}:{chromium}:{_VNC_PORT}:{vlc}"

    def save_state(self, path_to_vm: str, snapshot_name: str) -> None:  # noqa: ARG002
        """Save the machine's current state under a name, as a paused fork. Raises: ProviderError."""
        earlier = self._snapshots.pop(snapshot_name, None)
        if earlier is not None:
            earlier.held.close()
        with self._errors():
            self._snapshots[snapshot_name] = _held(self._fork(self._current))

    def revert_to_snapshot(self, path_to_vm: str, snapshot_name: str) -> str:
        """Replace the machine by a fork of the state saved under a name, or of the pool's template if there is none.

        The ports change, too.

        Raises:
            ProviderError: No machine could be created; the old one is already closed.
        """
        saved = self._snapshots.get(snapshot_name)
        with self._errors():
            if self._machine is not None:
                self._machine.held.close()
                self._machine = None
            self._start(self._fork(saved) if saved else self._reset())
        return path_to_vm

    def stop_emulator(self, path_to_vm: str) -> None:  # noqa: ARG002
        """Close the machine and all saved states. Idempotent."""
        machines = [machine for machine in (self._machine, *self._snapshots.values()) if machine is not None]
        self._machine, self._snapshots = None, {}
        for machine in machines:
            machine.held.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    # The part of a manager, whose machines have paths; ours have none, and exist from `start_emulator` on.

    def get_vm_path(self, **_: object) -> str:
        """Return a placeholder for a path."""
        return "envd"

    def add_vm(self, *_: object, **__: object) -> None:
        """Do nothing: machines are not registered, and leases expire."""

    initialize_registry = delete_vm = occupy_vm = check_and_clean = add_vm

    def list_free_vms(self, **_: object) -> list[str]:
        """Return none: machines are created on demand."""
        return []

    @property
    def _current(self) -> _Machine:
        if self._machine is None:
            raise RuntimeError("no machine is running; call start_emulator")
        return self._machine

    def _open_client(self) -> EnvClient:
        # On first use: OSWorld's runner creates its environments in forked processes, which have no thread of a client.
        if self._client is None:
            self._client = EnvClient(self._address, token=self._token, tls=self._tls)
        return self._client

    def _reset(self) -> Episode:
        return self._open_client().open(
            DESKTOP_TASK, pool=self._pool, lease_ttl=_LEASE, view=_NO_PIXELS, timeout=_RESET_TIMEOUT
        )

    def _fork(self, parent: _Machine) -> Episode:
        return self._open_client().fork(parent.episode, count=1, lease_ttl=_LEASE, view=_NO_PIXELS)[0]

    def _start(self, episode: Episode) -> None:
        """Make an episode the present machine, and forward its ports."""
        machine = self._machine = _held(episode)
        for port in _GUEST_PORTS:
            machine.ports.append(machine.held.enter_context(episode.forward(port)).local_port)

    def _check_pool(self, episode: Episode) -> None:
        """Check that DesktopEnv can use the machine. Raises: EnvError."""
        episode.run_command(["true"], timeout=_COMMAND_TIMEOUT)
        pools = self._open_client().list_pools()
        if not any(pool.always_running for pool in pools if pool.name == episode.pool):
            logger.warning(
                "pool %s: its guests stop between calls, which DesktopEnv does not expect; set pools.%s.always_running",
                episode.pool,
                episode.pool,
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise failures of the client as ProviderError."""
        try:
            yield
        except EnvError as error:
            # Without the cause: gRPC's own text repeats it over several lines.
            raise ProviderError(f"envd at {self._address}: {error} ({error.code})") from None
        except (ValueError, OSError) as error:
            raise ProviderError(f"envd at {self._address}: {error}") from error


def _held(episode: Episode) -> _Machine:
    held = ExitStack()
    held.enter_context(episode)
    return _Machine(episode, held)


def make_manager_and_provider() -> tuple[EnvdProvider, EnvdProvider]:
    """Return what OSWorld's factory returns for a provider, here one object for both parts.

    The environment variables are those of `envd.integrations.osworld.provider`.
    """
    address = os.environ.get("ENVD_ADDRESS", "127.0.0.1:50051")
    ca, cert, key = (_path(f"ENVD_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    tls = Tls(ca=ca, cert=cert, key=key) if ca else None
    provider = EnvdProvider(address, pool=os.environ.get("ENVD_POOL", ""), tls=tls)
    return provider, provider


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable, "")
    return Path(value) if value else None
