"""The gRPC server: our service, health and reflection on one address.

An address that other hosts can reach requires TLS and authentication.

Health is SERVING only between `start` and `drain`, so that clients and load balancers avoid a server that is not ready
or is stopping.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_reflection.v1alpha import reflection

from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.api.health import HealthServicer
from envd.api.interceptors import CallInterceptor
from envd.api.security.access import MAX_MESSAGE_BYTES
from envd.api.security.guard import RENEWAL_BURST, RENEWALS_PER_S, CallGuard, RateLimiter
from envd.api.security.secret_files import Reloaded
from envd.api.security.tls import server_credentials
from envd.api.security.tokens import SETTING as TOKENS_SETTING
from envd.api.security.tokens import TokenTable, read_tokens
from envd.api.servicer import CUAEnvServicer
from envd.base.aio import shielded
from envd.base.config import SecurityConfig
from envd.base.errors import cannot_bind
from envd.base.telemetry.metrics import Metrics
from envd.episodes.service import EpisodeService

logger = logging.getLogger(__name__)

# grpc logs a traceback for each client that leaves while a response is being sent.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError" not in record.getMessage())

SERVICE_NAME = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"].full_name

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detect half-open connections within 40 s, so that their calls do not hang.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 20 s; grpc's default minimum of 300 s ends their connection. On a busy host, pings are late and
    # then close together.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Otherwise the transport buffers up to 14 MiB of a request that no handler reads; with it, 3 MiB.
    ("grpc.http2.bdp_probe", 0),
    # While the event loop is busy, calls of all clients wait in gRPC. Beyond its default of 1,000 it answers some with
    # CANCELLED, without details: 1,445 of 4,000 in a test. The guard refuses a caller's excess calls instead.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
)


class ApiServer:
    """Serves one episode service."""

    def __init__(
        self,
        episodes: EpisodeService,
        *,
        listen: str,
        metrics: Metrics,
        security: SecurityConfig | None = None,
        renewals: RateLimiter | None = None,
        local_socket: Path | None = None,
    ) -> None:
        """Read tokens and certificates; nothing listens before `start`.

        Args:
            listen: Value of the setting `listen`, which `Config` has checked.
            security: Authentication and TLS; by default every caller that can reach the address is trusted.
            local_socket: A Unix socket of the daemon's own user to serve too, without TLS and by the same tokens: for
                the processes that the daemon starts. None for none.
            renewals: Limits renewals of each caller; by default `RENEWALS_PER_S`.

        Raises:
            ConfigError: A token or certificate file is invalid.
        """
        security = security or SecurityConfig()
        if renewals is None:
            renewals = RateLimiter(calls_per_second=RENEWALS_PER_S, burst=RENEWAL_BURST)
        self._socket_path = Path(listen.removeprefix("unix:")).absolute() if listen.startswith("unix:") else None
        # In the syntax of gRPC. Port 0 selects a free port.
        self._listen = listen if self._socket_path is None else f"unix:{self._socket_path}"
        self._local_socket = local_socket
        self._credentials = _credentials(security, metrics)
        self._options = (
            *_OPTIONS,
            # Further calls of a connection wait in the client, `KeepAlive` too, so a caller's own limit must be lower.
            ("grpc.max_concurrent_streams", 2 * security.max_calls_in_flight),
            # Otherwise a second daemon could listen on the same port, and each would get a part of the calls.
            ("grpc.so_reuseport", 0),
        )
        self._servicer = CUAEnvServicer(episodes)
        #: Admits its calls; other servers of the same episodes share it, and with it each caller's limits.
        self.guard = CallGuard(
            tokens=read_token_table(security, metrics),
            limiter=RateLimiter(calls_per_second=security.calls_per_second, burst=security.call_burst),
            renewals=renewals,
            max_calls=security.max_calls_in_flight,
            owner_of=episodes.owner_of,
        )
        self._interceptor = CallInterceptor(metrics, self.guard)
        self._health = HealthServicer(SERVICE_NAME)
        self._server: grpc.aio.Server | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """The address to connect to, with the actual port; empty before `start` and after `stop`."""
        return self._address

    async def start(self) -> str:
        """Listen and serve; return the bound address.

        On failure nothing listens.

        Raises:
            ConfigError: The address cannot be bound.
        """
        server = grpc.aio.server(interceptors=[self._interceptor], options=self._options)
        # By their generic handlers alone. For each method that is registered too, grpc.aio keeps a task that waits for
        # the method's next call, and renews all these waits at every call: with 24 methods 15 us of the 166 us of CPU
        # time that a call costs without any work.
        handlers: Any = SimpleNamespace(
            add_generic_rpc_handlers=server.add_generic_rpc_handlers, add_registered_method_handlers=lambda *_: None
        )
        env_pb2_grpc.add_CUAEnvServicer_to_server(self._servicer, handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, handlers)
        reflection.enable_server_reflection((SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME), server)
        try:
            # Access to the socket is access to every desktop: only the daemon's own user, from its creation on.
            with _private_files():
                port = self._bind(server)
                if self._local_socket is not None:
                    server.add_insecure_port(f"unix:{self._local_socket}")
            if self._socket_path:
                self._socket_path.chmod(0o600)
        except (RuntimeError, OSError) as error:
            await server.stop(None)
            reason = (
                str(error.strerror).lower().partition(" (")[0]
                if isinstance(error, OSError)
                else "address already in use"
            )
            raise cannot_bind("listen", self._listen, reason) from error
        self._server = server
        # grpc's main loop fails if its start is cancelled, and a server that is not stopped outlives the event loop.
        await shielded(server.start())
        self._address = self._listen if self._socket_path else f"{self._listen.rpartition(':')[0]}:{port}"
        self._health.set_serving(True)
        how = "in clear text" if self._credentials is None else "over TLS"
        logger.debug("serving %s on %s %s", SERVICE_NAME, self._address, how)
        return self._address

    async def drain(self) -> None:
        """Set health to NOT_SERVING and end watches; calls are still served. Idempotent."""
        self._health.set_serving(False)
        self._servicer.end_watches()

    async def stop(self, *, grace: timedelta = timedelta(0)) -> None:
        """Drain, accept no more calls, and cancel those that still run after `grace`. Idempotent."""
        await self.drain()
        server, self._server, self._address = self._server, None, ""
        if server is not None:
            await shielded(server.stop(grace.total_seconds()))
            logger.info("no longer serving on %s", self._listen)

    def _bind(self, server: grpc.aio.Server) -> int:
        if not self._socket_path:
            # gRPC names no reason in its error, and logs it on standard error by itself.
            host, _, port = self._listen.rpartition(":")
            family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            socket.create_server(address[:2], family=family).close()
        if self._credentials is None:
            return server.add_insecure_port(self._listen)
        return server.add_secure_port(self._listen, self._credentials)


@contextmanager
def _private_files() -> Iterator[None]:
    """Create files in the block with mode 0600. Do not await in the block: the umask is per process."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def read_token_table(security: SecurityConfig, metrics: Metrics) -> Reloaded[TokenTable] | None:
    """Return the accepted tokens; None without a file of them."""
    path = security.tokens_file
    if path is None:
        return None

    stale = metrics.security_files_stale.labels(setting="tokens_file")
    return Reloaded(TOKENS_SETTING, [path], lambda: read_tokens(path), on_stale=stale.set)


def _credentials(security: SecurityConfig, metrics: Metrics) -> grpc.ServerCredentials | None:
    if security.tls_cert is None or security.tls_key is None:
        return None
    stale = metrics.security_files_stale.labels(setting="tls_cert")
    return server_credentials(
        cert=security.tls_cert, key=security.tls_key, client_ca=security.client_ca, on_stale=stale.set
    )
