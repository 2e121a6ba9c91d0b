"""A port of a real guest that is paused between calls: bytes in both directions, half-close, refusal, and forks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cuaenv.client import AsyncEnvClient
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from tests.support.real_desktops import QEMU, Backend

pytestmark = [pytest.mark.timeout(600)]

PORT = 9222
#: Echoes one connection at a time, and says after the client's end how many bytes came.
SERVER = f"""
import os, socket
server = socket.create_server(("127.0.0.1", {PORT}))
if os.fork():
    os._exit(0)
os.setsid()
while True:
    connection, _ = server.accept()
    count = 0
    while data := connection.recv(1 << 16):
        count += len(data)
        connection.sendall(data)
    connection.sendall(b"%d bytes" % count)
    connection.close()
"""
#: Releases the command's pipes, so that it ends.
START = 'exec python3 -c "$0" </dev/null >/dev/null 2>&1'


@pytest.fixture
async def client(real_backend: Backend, vm_state_dir: Path) -> AsyncIterator[AsyncEnvClient]:
    task = Task(task_id="test/nothing", instruction="Nothing.", level=1, infeasible=True)
    async with real_backend.desktops(TaskCatalogue([task]), state_dir=vm_state_dir) as client:
        yield client


async def test_a_real_guests_port_carries_bytes_both_ways(
    client: AsyncEnvClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cuaenv.client.forwarding")
    block = bytes(range(256)) * 4096
    async with client.reset("test/nothing") as episode, episode.forward(PORT) as forward:
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert "Connection refused" in caplog.text

        assert (await episode.run_command(["bash", "-c", START, SERVER])).exit_code == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        for _ in range(8):
            writer.write(block)
            assert await reader.readexactly(len(block)) == block
        writer.write_eof()
        assert await reader.read() == b"%d bytes" % (8 * len(block))
        writer.close()
        # Its machine is destroyed, and a connection ends with it.
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        writer.write(b"!")
        assert await reader.readexactly(1) == b"!"
        await episode.close()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


@pytest.mark.vm
@pytest.mark.parametrize("real_backend", [pytest.param(QEMU, id="qemu")], indirect=True)
async def test_a_fork_starts_without_connections_and_its_parent_keeps_them(client: AsyncEnvClient) -> None:
    async with client.reset("test/nothing") as episode, episode.forward(PORT) as forward:
        assert (await episode.run_command(["bash", "-c", START, SERVER])).exit_code == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
        writer.write(b"before the fork")
        assert await reader.readexactly(15) == b"before the fork"
        async with client.fork(episode, count=1) as (fork,), fork.forward(PORT) as its_forward:
            writer.write(b"after the fork")
            assert await reader.readexactly(14) == b"after the fork"
            # The guest's program serves one connection at a time: in the fork, the parent's must end first.
            its_reader, its_writer = await asyncio.open_connection("127.0.0.1", its_forward.local_port)
            its_writer.write_eof()
            assert await its_reader.read() == b"0 bytes"
            its_writer.close()
        writer.write_eof()
        assert await reader.read() == b"29 bytes"
        writer.close()
