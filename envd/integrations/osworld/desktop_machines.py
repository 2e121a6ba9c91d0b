"""Episodes as machines of OSWorld's `DesktopEnv`, over gRPC; `envd.integrations.osworld.provider` registers them."""

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import grpc
from cuaenv.v1 import env_pb2, env_pb2_grpc

from envd.integrations.osworld import DESKTOP_TASK
from envd.integrations.osworld.stream import GuestPort
from envd.integrations.osworld.tunnel import GuestTunnel, RunInGuest

#: HTTP services of the guest that the tunnels forward, one command a request: OSWorld's own and VLC's.
_SERVICE_PORT, _VLC_PORT = 5000, 8080
#: Chrome's DevTools, a WebSocket. OSWorld's tasks start Chrome on port 1337 and forward this port to it in the guest.
_CHROMIUM_PORT = 9222
#: DesktopEnv also expects this port, on which nothing listens: it is for people.
_VNC_PORT = 8006

_LEASE_S = 600
_KEEP_ALIVE_S = 60.0
_RESET_TIMEOUT_S = 900.0
_CALL_TIMEOUT_S = 60.0
#: Above the 120 s that OSWorld's own service allows a command.
_COMMAND_TIMEOUT_S = 150
_MAX_MESSAGE_BYTES = 128 << 20

M = TypeVar("M")

logger = logging.getLogger(__name__)


class ProviderError(RuntimeError):
    """A call to the daemon failed; the message names the daemon and the cause in one line."""


class EnvdProvider:
    """Provider of machines for `DesktopEnv`; holds at most one machine.

    Args:
        address: Of the daemon, HOST:PORT on loopback or behind a tunnel.
        pool: Empty for the only one that fits.
        token: Empty if the daemon requires none.
    """

    def __init__(self, address: str, *, pool: str = "", token: str = "") -> None:
        self._address = address
        self._pool = pool
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._episode_id = ""
        self._snapshots: dict[str, str] = {}
        self._tunnels: tuple[GuestTunnel | GuestPort, ...] = ()
        self._stopping = threading.Event()
        self._channel: grpc.Channel | None = None

    def __repr__(self) -> str:
        return f"<EnvdProvider {self._address} {self._episode_id or 'without a machine'}>"

    def start_emulator(self, path_to_vm: str, headless: bool, os_type: str = "") -> None:  # noqa: ARG002
        """Create a machine, unless one exists.

        Raises:
            ProviderError: It could not be created, or its pool does not allow access to its guests.
        """
        if not self._episode_id:
            episode = self._reset()
            self._episode_id = episode.episode_id
            self._check_pool(episode)
        if not self._tunnels:
            self._tunnels = (
                GuestTunnel(self._run, guest_port=_SERVICE_PORT),
                GuestPort(self._run_in_current, guest_port=_CHROMIUM_PORT),
                GuestTunnel(self._run, guest_port=_VLC_PORT),
            )
            self._stopping = threading.Event()
            threading.Thread(target=self._keep_alive, args=(self._stopping,), name="envd-leases", daemon=True).start()

    def get_ip_address(self, path_to_vm: str) -> str:  # noqa: ARG002
        """Return `host:server:chromium:vnc:vlc`; all ports but that of VNC lead to the guest."""
        if not self._tunnels:
            raise RuntimeError("no machine is running; call start_emulator")
        server, chromium, vlc = (tunnel.port for tunnel in self._tunnels)
        return f"127.0.0.1:{server}:{chromium}:{_VNC_PORT}:{vlc}"

    def save_state(self, path_to_vm: str, snapshot_name: str) -> None:  # noqa: ARG002
        """Save the machine's current state under a name, as a paused fork. Raises: ProviderError."""
        earlier = self._snapshots.pop(snapshot_name, "")
        if earlier:
            self._close(earlier)
        self._snapshots[snapshot_name] = self._fork(self._episode_id)

    def revert_to_snapshot(self, path_to_vm: str, snapshot_name: str) -> str:
        """Replace the machine by a fork of the state saved under a name, or of the pool's template if there is none.

        Raises:
            ProviderError: No machine could be created; the old one is already closed.
        """
        replaced, self._episode_id = self._episode_id, ""
        if replaced:
            self._close(replaced)
        saved = self._snapshots.get(snapshot_name)
        self._episode_id = self._fork(saved) if saved else self._reset().episode_id
        return path_to_vm

    def stop_emulator(self, path_to_vm: str) -> None:  # noqa: ARG002
        """Close the machine and all saved states. Idempotent."""
        self._stopping.set()
        for tunnel in self._tunnels:
            tunnel.close()
        self._tunnels = ()
        for episode_id in (self._episode_id, *self._snapshots.values()):
            if episode_id:
                # If the daemon is gone, so are its episodes.
                with suppress(ProviderError):
                    self._close(episode_id)
        self._episode_id, self._snapshots = "", {}
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _stub(self) -> env_pb2_grpc.CUAEnvStub:
        # Created on first use: OSWorld's runner creates its environments in forked processes.
        if self._channel is None:
            options = (
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.enable_http_proxy", 0),
            )
            self._channel = grpc.insecure_channel(self._address, options=options)
        return env_pb2_grpc.CUAEnvStub(self._channel)

    def _call(self, method: Callable[..., M], request: object, *, timeout_s: float = _CALL_TIMEOUT_S) -> M:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            text = f"envd at {self._address}: {error.details()} ({error.code().name})"
            # Without the cause: gRPC's own text repeats it over several lines.
            raise ProviderError(text) from None

    def _check_pool(self, episode: env_pb2.Episode) -> None:
        """Close the machine and raise ProviderError unless DesktopEnv can use its pool."""
        try:
            request = env_pb2.RunGuestCommandRequest(episode_id=episode.episode_id, argv=["true"])
            request.timeout.FromSeconds(_COMMAND_TIMEOUT_S)
            self._call(self._stub().RunGuestCommand, request, timeout_s=_COMMAND_TIMEOUT_S + _CALL_TIMEOUT_S)
            pools = self._call(self._stub().ListPools, env_pb2.ListPoolsRequest()).pools
        except ProviderError:
            self.stop_emulator("")
            raise
        if not any(pool.always_running for pool in pools if pool.name == episode.pool):
            logger.warning(
                "pool %s: its guests stop between calls, which DesktopEnv does not expect; set pools.%s.always_running",
                episode.pool,
                episode.pool,
            )

    def _reset(self) -> env_pb2.Episode:
        request = env_pb2.ResetRequest(request_id=str(uuid.uuid4()), task_id=DESKTOP_TASK, pool=self._pool)
        request.lease_ttl.FromSeconds(_LEASE_S)
        request.observation.encoding = env_pb2.ENCODING_NONE
        return self._call(self._stub().Reset, request, timeout_s=_RESET_TIMEOUT_S).episodes[0]

    def _fork(self, episode_id: str) -> str:
        request = env_pb2.ForkRequest(request_id=str(uuid.uuid4()), episode_id=episode_id, fork_count=1)
        request.lease_ttl.FromSeconds(_LEASE_S)
        request.observation.encoding = env_pb2.ENCODING_NONE
        return self._call(self._stub().Fork, request).episodes[0].episode_id

    def _close(self, episode_id: str) -> None:
        self._call(self._stub().Close, env_pb2.CloseRequest(episode_id=episode_id))

    def _run(self, argv: tuple[str, ...], stdin: bytes) -> bytes:
        return self._run_in(self._episode_id, argv, stdin)

    def _run_in_current(self) -> RunInGuest:
        """Return a function that runs commands in the present machine, also after a revert has replaced it."""
        return partial(self._run_in, self._episode_id)

    def _run_in(self, episode_id: str, argv: tuple[str, ...], stdin: bytes) -> bytes:
        request = env_pb2.RunGuestCommandRequest(episode_id=episode_id, argv=argv, stdin=stdin)
        request.timeout.FromSeconds(_COMMAND_TIMEOUT_S)
        try:
            result = self._call(self._stub().RunGuestCommand, request, timeout_s=_COMMAND_TIMEOUT_S + _CALL_TIMEOUT_S)
        except ProviderError as error:
            raise OSError(f"{episode_id}: {error}") from error
        if result.exit_code:
            raise OSError(f"{episode_id}: {result.stderr.decode(errors='replace')}")
        return result.stdout

    def _keep_alive(self, stopping: threading.Event) -> None:
        while not stopping.wait(_KEEP_ALIVE_S):
            episode_ids = [episode_id for episode_id in (self._episode_id, *self._snapshots.values()) if episode_id]
            # The next call reports the failure.
            with suppress(ProviderError):
                self._call(self._stub().KeepAlive, env_pb2.KeepAliveRequest(episode_ids=episode_ids))


class EnvdManager:
    """Manager of machine paths for `DesktopEnv`; our machines have no paths."""

    def get_vm_path(self, **_: object) -> str:
        """Return a placeholder for a path."""
        return "envd"

    def initialize_registry(self, **_: object) -> None:
        """Do nothing: machines are not registered."""

    def add_vm(self, *_: object, **__: object) -> None:
        """Do nothing: machines are not registered."""

    def delete_vm(self, *_: object, **__: object) -> None:
        """Do nothing: machines are not registered."""

    def occupy_vm(self, *_: object, **__: object) -> None:
        """Do nothing: machines are not registered."""

    def list_free_vms(self, **_: object) -> list[str]:
        """Return none: machines are created on demand."""
        return []

    def check_and_clean(self, **_: object) -> None:
        """Do nothing: leases expire."""
