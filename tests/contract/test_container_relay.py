"""The port of the host's loopback that leads to a Unix socket of a container."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from envd.base.errors import GuestUnresponsive
from envd.hypervisor.agent_channel import AgentChannel
from envd.hypervisor.oci.relay import Relay


async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request, which ends with the client's direction, in reverse."""
    writer.write((await reader.read())[::-1])
    writer.write_eof()
    writer.close()


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    relay = Relay(tmp_path / "socket")
    yield relay
    relay.close()
    await asyncio.sleep(0)


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_both_directions_are_relayed_each_to_its_own_end(relay: Relay, tmp_path: Path) -> None:
    server = await asyncio.start_unix_server(reverse, tmp_path / "socket")
    port = await relay.open()
    data = bytes(range(256)) * 4096
    assert await asyncio.gather(*(ask(port, data) for _ in range(3))) == [data[::-1]] * 3
    server.close()


async def test_a_connection_waits_for_a_service_that_starts_later(relay: Relay, tmp_path: Path) -> None:
    port = await relay.open()
    asking = asyncio.create_task(ask(port, b"early"))
    await asyncio.sleep(0.1)
    assert not asking.done()
    server = await asyncio.start_unix_server(reverse, tmp_path / "socket")
    assert await asking == b"ylrae"
    server.close()


async def test_a_link_in_place_of_the_socket_leads_nowhere(tmp_path: Path) -> None:
    # The container's root can replace the socket by a link to one of the host's, or of another container.
    async with await asyncio.start_unix_server(reverse, tmp_path / "of-the-host"):
        (tmp_path / "link").symlink_to(tmp_path / "of-the-host")
        (tmp_path / "file").touch()
        for name in ("link", "file"):
            relay = Relay(tmp_path / name)
            with suppress(ConnectionResetError):
                assert await ask(await relay.open(), b"secret") == b""
            relay.close()
            await asyncio.sleep(0)
            channel = AgentChannel(tmp_path / name, machine_id="m")
            with pytest.raises(GuestUnresponsive, match=os.strerror(errno.ENOTSOCK)):
                await channel.command("guest-ping", timeout_s=5)
            await channel.close()


async def test_closing_ends_open_connections_and_listens_no_more(relay: Relay, tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        begun.set()
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_unix_server(wait_for_end, tmp_path / "socket")
    port = await relay.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x")
    await asyncio.wait_for(begun.wait(), 60)
    relay.close()
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await asyncio.wait_for(ended.wait(), 60)
    server.close()
