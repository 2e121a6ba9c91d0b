"""Clients that were closed, forked, or follow an unreachable one, each in a process of its own."""

import asyncio
import sys

import pytest

from tests.support.server import serve_fake

FORKED = """\
import asyncio, gc, multiprocessing, os, sys
from cuaenv.client import AsyncEnvClient, ClientClosed, EnvClient

async def pools(client):
    return await client.list_pools()

def use_async(client):
    return asyncio.run(pools(client))

def use_sync(client):
    return client.list_pools()

def child(use, client):
    try:
        use(client)
    except ClientClosed as error:
        print(error, flush=True)

def in_a_fork(use, client):
    process = multiprocessing.get_context("fork").Process(target=child, args=(use, client))
    process.start()
    process.join()
    assert process.exitcode == 0

target = sys.argv[1]
"""
CASES = {
    "the same synchronous client": """
with EnvClient(target) as client:
    client.list_pools()
    in_a_fork(use_sync, client)
    client.list_pools()
""",
    "an unused synchronous client": """
with EnvClient(target) as client:
    in_a_fork(use_sync, client)
""",
    "a new synchronous client": """
with EnvClient(target) as client:
    client.list_pools()
in_a_fork(lambda _: (gc.collect(), EnvClient(target).list_pools()), None)  # the closed client leaves nothing to it
""",
    "the same asyncio client": """
client = AsyncEnvClient(target)
asyncio.run(pools(client))
in_a_fork(use_async, client)
""",
    "a new asyncio client": """
asyncio.run(pools(AsyncEnvClient(target)))
in_a_fork(use_async, AsyncEnvClient(target))
""",
    "an episode": """
with EnvClient(target) as client, client.reset("fake/count-to-five") as episode:
    in_a_fork(lambda episode: episode.observe(), episode)
    episode.observe()
""",
}
UNREACHABLE = """\
import sys
from datetime import timedelta
from cuaenv.client import EnvClient, RetryPolicy, Unreachable

client = EnvClient("127.0.0.1:1", retry=RetryPolicy(connect_timeout=timedelta(seconds=0.5)))
try:
    client.list_pools()
except Unreachable:
    client.close()
for _ in range(2):
    with EnvClient(sys.argv[1]) as other, other.reset("fake/count-to-five"):
        pass
"""


async def run(program: str, target: str) -> tuple[str, str]:
    """Run a program; return its output and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, target, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(), errors.decode()


@pytest.mark.parametrize("case", CASES)
async def test_a_client_in_a_forked_process_raises_an_error_with_a_remedy(case: str) -> None:
    async with serve_fake(size=1, capacity=1) as server:
        out, errors = await run(FORKED + CASES[case], server.address)
    assert out.startswith(f"client of {server.address}: process ")
    assert "gRPC does not work after a fork; start child processes with the method `spawn`" in out
    assert "Traceback" not in errors


async def test_a_forked_process_may_open_the_first_client() -> None:
    async with serve_fake(size=1, capacity=1) as server:
        first = "in_a_fork(lambda _: print(len(EnvClient(target).list_pools()), flush=True), None)"
        assert await run(FORKED + first, server.address) == ("1\n", "")


async def test_a_client_that_follows_an_unreachable_one_logs_no_traceback() -> None:
    async with serve_fake(size=1, capacity=1) as server:
        _, errors = await run(UNREACHABLE, server.address)
    assert "Traceback" not in errors
