"""The contract of guestd, of both implementations: the service of Linux guests, or the one of drawn desktops."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import pytest

from envd.base.errors import GuestError, GuestUnresponsive, MachineLost
from envd.desktop.guestd import GuestdClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A guest whose guestd is under test."""

    url: str
    home: str
    read: Callable[[str], bytes]
    """Return the bytes of one of its files."""


class GuestdContract:
    """A subclass provides the fixture `guest`."""

    @pytest.fixture
    def guest(self) -> Guest:
        raise NotImplementedError

    @pytest.fixture
    async def client(self, guest: Guest) -> AsyncIterator[GuestdClient]:
        async with GuestdClient(guest.url, lost=asyncio.Event()) as client:
            yield client

    async def test_a_command_has_its_output_and_its_exit_code(self, client: GuestdClient, guest: Guest) -> None:
        data = bytes(range(256))
        await client.write_file(f"{guest.home}/raw", data)
        shown = await client.execute(["cat", "~/raw"], timeout_s=60.0)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (0, data, b"")
        assert (await client.execute(["cat"], stdin=data, timeout_s=60.0)).stdout == data
        assert (await client.execute(["false"], timeout_s=60.0)).exit_code == 1

    async def test_a_timeout_is_unresponsive_and_a_program_that_is_missing_is_an_error(
        self, client: GuestdClient
    ) -> None:
        with pytest.raises(GuestUnresponsive, match=r"timed out after 0\.2"):
            await client.execute(["sleep", "60"], timeout_s=0.2)
        for call in (client.execute(["no-such-program"], timeout_s=60.0), client.launch(["no-such-program"])):
            with pytest.raises(GuestError, match="no-such-program"):
                await call

    async def test_files_are_written_byte_for_byte_in_new_directories(self, client: GuestdClient, guest: Guest) -> None:
        path, data = f"{guest.home}/déjà/vu", bytes(range(256)) * 8192 + b"\r\n"
        await client.write_file(path, data)
        assert guest.read(path) == data

    async def test_a_repeated_request_has_its_effect_once(self, guest: Guest) -> None:
        command = {"command": ["sh", "-c", "echo once >> ~/count.txt"]}
        async with aiohttp.ClientSession() as http:
            calls = (
                http.post(f"{guest.url}/execute", json=command, headers={"X-Request-Id": "same"}) for _ in range(3)
            )
            assert [response.status for response in await asyncio.gather(*calls)] == [200] * 3
        assert guest.read(f"{guest.home}/count.txt") == b"once\n"

    async def test_a_running_call_fails_when_the_machine_is_lost(self, guest: Guest) -> None:
        lost = asyncio.Event()
        async with GuestdClient(guest.url, lost=lost) as client:
            asyncio.get_running_loop().call_later(0.1, lost.set)
            with pytest.raises(MachineLost, match="/execute"):
                await client.execute(["sleep", "30"], timeout_s=60)
            with pytest.raises(MachineLost):
                await client.session()
