"""A caller that tries to disturb the others: `python -m tests.soak.neighbour ADDRESS` until its input ends.

It lists and exports checkpoints many times at once, imports what it exported, and leaves exports unread. Refusals are
what a daemon under load is for. At the end it writes one line of JSON: its calls by name, those that succeeded.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import grpc

from cuaenv.v1 import env_pb2, env_pb2_grpc

_LISTING_COUNT = 16
_EXPORTING_COUNT = 4
_UNREAD_COUNT = 4
_CALL_S = 20.0
#: How long an export is left unread.
_UNREAD_S = 3.0
_PAUSE_S = 1.0


class _Neighbour:
    def __init__(self, stub: "env_pb2_grpc.CUAEnvAsyncStub") -> None:
        self._stub = stub
        self._random = random.Random(0)
        self._ids: list[str] = []
        self.counts = Counter[str]()

    async def run(self) -> None:
        works = [self._list] * _LISTING_COUNT + [self._copy] * _EXPORTING_COUNT + [self._leave_unread] * _UNREAD_COUNT
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(self._repeat(work))

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await work()
            # Without it, this process and the daemon's answers to it take both cores of a small host. With 0.2 s they
            # take a third of a soak's CPU time.
            await asyncio.sleep(_PAUSE_S)

    async def _list(self) -> None:
        request = env_pb2.ListCheckpointsRequest(page_size=1000)
        found = await self._stub.ListCheckpoints(request, timeout=_CALL_S)
        self._ids = [checkpoint.checkpoint_id for checkpoint in found.checkpoints]
        self.counts["lists"] += 1

    def _export(self) -> env_pb2.ExportCheckpointRequest:
        return env_pb2.ExportCheckpointRequest(checkpoint_id=self._random.choice(self._ids or ["ckpt-none"]))

    async def _copy(self) -> None:
        data = [part.data async for part in self._stub.ExportCheckpoint(self._export(), timeout=_CALL_S)]
        self.counts["exports"] += 1

        def pieces() -> Iterator[env_pb2.ImportCheckpointRequest]:
            return (env_pb2.ImportCheckpointRequest(data=piece) for piece in data)

        await self._stub.ImportCheckpoint(pieces(), timeout=_CALL_S)
        self.counts["imports"] += 1

    async def _leave_unread(self) -> None:
        call = self._stub.ExportCheckpoint(self._export(), timeout=_CALL_S)
        await call.read()
        await asyncio.sleep(_UNREAD_S)
        call.cancel()
        self.counts["unread"] += 1


async def _main(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        neighbour = _Neighbour(env_pb2_grpc.CUAEnvStub(channel))  # type: ignore[arg-type]
        running = asyncio.create_task(neighbour.run())
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error
    print(json.dumps(neighbour.counts), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
