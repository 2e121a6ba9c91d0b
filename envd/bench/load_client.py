"""Clients that put load on a daemon from another process, each with an episode of its own.

`envd bench scale` starts `python -m envd.bench.load_client`, which reads a plan as JSON from standard input. It opens
the episodes and takes one step in each. Then it runs a phase for each line of input and writes its result as JSON:
first each client steps repeatedly, then each calls an echo over the same gRPC stack, with payloads of the steps' median
sizes. The echo is the ceiling. Hence bare stubs and not `cuaenv.client`, whose work per call would count as the
daemon's.
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high
from typing import TYPE_CHECKING, Any

import grpc
import uvloop
from cuaenv.v1 import env_pb2, env_pb2_grpc
from cuaenv.wire import RELAYED_KEY
from google.protobuf.duration_pb2 import Duration

from envd.base.aio import shielded

if TYPE_CHECKING:
    from cuaenv.v1.env_pb2_grpc import CUAEnvAsyncStub

_ECHO = "/envd.bench.Echo/Echo"
#: Connections of the process. The server handles one as one byte stream, and real clients are several processes.
_ECHO_CHANNELS = 8
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # Bypass HTTP proxies: the daemon is local.
    ("grpc.enable_http_proxy", 0),
)
#: More than a client takes in any run.
MAX_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load."""

    address: str
    """Address of the daemon."""
    echo_address: str
    task_id: str
    pool: str
    client_count: int
    channel_count: int
    """Connections of each process, among which the kernel chooses shards."""
    duration_s: float
    """Duration of each measured phase."""
    points: Sequence[tuple[int, int]]
    """Points that each client clicks, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of one measured phase."""

    call_count: int
    elapsed_s: float
    latencies_ms: Sequence[float]
    """Duration of each call."""
    request_bytes: int = 0
    """Median."""
    response_bytes: int = 0
    """Median."""
    keyframe_count: int = 0
    """Frames that were sent whole; all others were sent as changes, or were equal."""
    client_cpu_s: float = 0.0


class EchoServer:
    """Returns as many bytes as each call requests; listens on a free loopback port."""

    def __init__(self) -> None:
        options = (
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            # With its default of 1,000 gRPC cancels calls of 1,024 clients.
            ("grpc.server.max_pending_requests", 16_384),
        )
        self._server = grpc.aio.server(options=options)
        self._responses: dict[int, bytes] = {}

    async def start(self) -> str:
        """Start serving, and return the address."""
        handler: Any = grpc.unary_unary_rpc_method_handler(self._echo)
        service, _, method = _ECHO.removeprefix("/").rpartition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await shielded(self._server.start())
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop serving."""
        await shielded(self._server.stop(None))

    async def _echo(self, request: bytes, _: object) -> bytes:
        size = int.from_bytes(request[:_LENGTH_BYTES], "big")
        return self._responses.setdefault(size, bytes(size))


class _Client:
    """One client with one episode: it steps repeatedly, and sends the id of the image that it has."""

    def __init__(self, stubs: "Sequence[CUAEnvAsyncStub]", plan: LoadPlan, number: int) -> None:
        self._stubs = stubs
        self._stub = stubs[number % len(stubs)]
        self._plan = plan
        self._number = number
        self._episode_id = ""
        self._image_id = ""
        self._step_count = 0
        self.request_bytes: list[int] = []
        self.response_bytes: list[int] = []
        self.keyframe_count = 0

    async def open(self) -> None:
        request = env_pb2.ResetRequest(
            request_id=str(uuid.uuid4()),
            task_id=self._plan.task_id,
            pool=self._plan.pool,
            lease_ttl=Duration(seconds=3600),
            max_steps=MAX_STEPS,
            observation=env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_RAW_ZSTD),
        )
        response = await self._stub.Reset(request, timeout=300)
        self._episode_id = response.episodes[0].episode_id
        self._image_id = response.observations[0].frame.image_id

    async def wake(self) -> None:
        """Take the first step, which wakes the machine, and more until one is not relayed, over each connection once.

        Real clients choose a connection to the episode's process in the same way.
        """
        for turn in range(len(self._stubs)):
            self._stub = self._stubs[(self._number + turn) % len(self._stubs)]
            if not await self.step():
                return

    async def step(self) -> bool:
        """Take a step; return whether it was relayed."""
        x, y = self._plan.points[(self._number + self._step_count) % len(self._plan.points)]
        request = env_pb2.StepRequest(
            request_id=f"{self._episode_id}-{self._step_count}",
            episode_id=self._episode_id,
            step_index=self._step_count,
            actions=[env_pb2.Action(click=env_pb2.Click(at=env_pb2.Point(x=x, y=y)))],
            settle=env_pb2.SettlePolicy(quiet=Duration()),
            observation=env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_RAW_ZSTD, known_image_id=self._image_id),
        )
        call: Any = self._stub.Step(request, timeout=60)
        response = await call
        frame = response.observation.frame
        self._image_id = frame.image_id
        self._step_count += 1
        self.keyframe_count += frame.HasField("keyframe")
        if self._step_count % 8 == 1:
            self.request_bytes.append(request.ByteSize())
            self.response_bytes.append(response.ByteSize())
        return any(key == RELAYED_KEY for key, _ in await call.trailing_metadata())

    async def close(self) -> None:
        await self._stub.Close(env_pb2.CloseRequest(episode_id=self._episode_id), timeout=60)


async def _measure(calls: Sequence[Callable[[], Awaitable[object]]], duration_s: float) -> tuple[list[float], float]:
    """Let every client call repeatedly; return the duration of each call in ms, and of the phase in seconds."""
    latencies_ms: list[float] = []
    begin_s = time.perf_counter()

    async def client(call: Callable[[], Awaitable[object]]) -> None:
        while (start_s := time.perf_counter()) - begin_s < duration_s:
            await call()
            latencies_ms.append((time.perf_counter() - start_s) * 1000)

    await asyncio.gather(*(client(call) for call in calls))
    return latencies_ms, time.perf_counter() - begin_s


async def _play(plan: LoadPlan) -> None:
    loop = asyncio.get_running_loop()
    channels = [
        grpc.aio.insecure_channel(plan.address, options=_unshared_options(i)) for i in range(plan.channel_count)
    ]
    stubs: list[Any] = [env_pb2_grpc.CUAEnvStub(channel) for channel in channels]
    clients = [_Client(stubs, plan, number) for number in range(plan.client_count)]
    await asyncio.gather(*(client.open() for client in clients))
    await asyncio.gather(*(client.wake() for client in clients))
    for client in clients:
        client.keyframe_count = 0
    _send({"opened": len(clients)})
    if await loop.run_in_executor(None, sys.stdin.readline):
        cpu_s = time.process_time()
        latencies_ms, elapsed_s = await _measure([client.step for client in clients], plan.duration_s)
        cpu_s = time.process_time() - cpu_s
        request_bytes = median_high(size for client in clients for size in client.request_bytes)
        response_bytes = median_high(size for client in clients for size in client.response_bytes)
        result = LoadResult(
            call_count=len(latencies_ms),
            elapsed_s=elapsed_s,
            latencies_ms=latencies_ms,
            request_bytes=request_bytes,
            response_bytes=response_bytes,
            keyframe_count=sum(client.keyframe_count for client in clients),
            client_cpu_s=cpu_s,
        )
        _send(asdict(result))
        if await loop.run_in_executor(None, sys.stdin.readline):
            _send(asdict(await _echoes(plan, request_bytes, response_bytes)))
            await loop.run_in_executor(None, sys.stdin.readline)
    await asyncio.gather(*(client.close() for client in clients))
    for channel in channels:
        await channel.close()


async def _echoes(plan: LoadPlan, request_bytes: int, response_bytes: int) -> LoadResult:
    channels = [
        grpc.aio.insecure_channel(plan.echo_address, options=_unshared_options(i)) for i in range(_ECHO_CHANNELS)
    ]
    methods: list[Any] = [channel.unary_unary(_ECHO) for channel in channels]
    request = response_bytes.to_bytes(_LENGTH_BYTES, "big") + bytes(max(0, request_bytes - _LENGTH_BYTES))

    def caller(number: int) -> Callable[[], Awaitable[object]]:
        method = methods[number % _ECHO_CHANNELS]
        return lambda: method(request, timeout=60)

    calls = [caller(number) for number in range(plan.client_count)]
    await asyncio.gather(*(call() for call in calls))
    latencies_ms, elapsed_s = await _measure(calls, plan.duration_s)
    for channel in channels:
        await channel.close()
    return LoadResult(call_count=len(latencies_ms), elapsed_s=elapsed_s, latencies_ms=latencies_ms)


def _unshared_options(number: int) -> tuple[tuple[str, int], ...]:
    # Channels with equal options share one connection.
    return (*_CHANNEL_OPTIONS, ("envd.channel_number", number))


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_play(LoadPlan(**json.loads(sys.stdin.readline()))))
