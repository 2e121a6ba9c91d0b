"""The gRPC server: our service, health and reflection on one address of this host.

Health says SERVING only between `start` and `drain`, so that a client or load balancer never meets a server that
is not ready or about to go.
"""

import ipaddress
import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
from cuaenv.v1 import env_pb2, env_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from envd.api.interceptors import CallInterceptor
from envd.api.servicer import CUAEnvServicer, Episodes
from envd.errors import ConfigError
from envd.telemetry.metrics import Metrics

_logger = logging.getLogger(__name__)

SERVICE_NAME = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"].full_name
MAX_MESSAGE_BYTES = 64 << 20

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Half-open connections: found within 40 s, so that their calls do not wait for ever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping as often themselves; grpc's default of 300 s would answer them with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Two daemons on one port would each get some of the calls; have the second one fail to start.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Where to listen: a Unix socket's path, or a loopback host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def target(self) -> str:
        """The address as gRPC writes it."""
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


def parse_listen(listen: str) -> ListenAddress:
    """Read `HOST:PORT`, `[::1]:PORT` or `unix:PATH`. Port 0 takes a free one.

    Raises:
        ConfigError: Malformed, or an address that other hosts can reach.
    """
    if listen.startswith("unix:"):
        path = listen.removeprefix("unix:")
        if not path:
            raise ConfigError(f"listen {listen!r} names no socket; write unix:PATH")
        return ListenAddress(path=Path(path).absolute())
    host, _, port = listen.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or is_bare_ipv6 or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(
            f"listen {listen!r} is not HOST:PORT, [IPV6]:PORT or unix:PATH; write such as 127.0.0.1:50051"
        )
    if not _is_loopback(host):
        raise ConfigError(
            f"listen {listen!r} can be reached from other hosts, which needs TLS and a token, and this release has "
            "neither; listen on 127.0.0.1 or unix:PATH and forward the port over ssh"
        )
    return ListenAddress(host=host, port=int(port))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class ApiServer:
    """Serves one episode service."""

    def __init__(self, episodes: Episodes, *, listen: str, metrics: Metrics) -> None:
        """Check the address; nothing listens before `start`.

        Raises:
            ConfigError: The address is malformed, or other hosts can reach it.
        """
        self._listen = parse_listen(listen)
        self._servicer = CUAEnvServicer(episodes)
        self._interceptor = CallInterceptor(metrics)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._address = ""

    def __repr__(self) -> str:
        return f"<ApiServer {self._address or f'not listening, for {self._listen.target}'}>"

    @property
    def address(self) -> str:
        """The address that clients dial, with the true port; empty before `start` and after `stop`."""
        return self._address

    async def start(self) -> str:
        """Listen and serve; return the bound address.

        On failure nothing listens.

        Raises:
            ConfigError: The address cannot be bound.
        """
        await self._set_health(serving=False)
        server = grpc.aio.server(interceptors=[self._interceptor], options=_OPTIONS)
        env_pb2_grpc.add_CUAEnvServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = server.add_insecure_port(self._listen.target)
            if self._listen.path:
                # Whoever may connect may drive every desktop: the daemon's own user only.
                self._listen.path.chmod(0o600)
        except (RuntimeError, OSError) as error:
            await server.stop(None)
            raise ConfigError(f"listen {self._listen.target} cannot be bound: {error}") from error
        await server.start()
        self._server = server
        self._address = self._listen.target if self._listen.path else f"{self._listen.host}:{port}"
        await self._set_health(serving=True)
        _logger.info("serving %s on %s", SERVICE_NAME, self._address)
        return self._address

    async def drain(self) -> None:
        """Have health say NOT_SERVING, and end watches; calls are still answered. Idempotent."""
        await self._health.enter_graceful_shutdown()
        self._servicer.end_watches()

    async def stop(self, *, grace: timedelta = timedelta(0)) -> None:
        """Drain, take no more calls, and cut off those that still run after `grace`. Idempotent."""
        await self.drain()
        server, self._server, self._address = self._server, None, ""
        if server is not None:
            await server.stop(grace.total_seconds())
            _logger.info("no longer serving on %s", self._listen.target)

    async def _set_health(self, *, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", SERVICE_NAME):
            await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)
