"""The provider of machines for OSWorld's DesktopEnv, over real gRPC to a server of fake machines."""

import asyncio
import traceback
from collections.abc import AsyncIterator

import aiohttp
import pytest

from envd.integrations.osworld import DESKTOP_TASK
from envd.integrations.osworld.desktop_machines import EnvdManager, EnvdProvider, ProviderError
from envd.tasks.model import Task
from tests.support.server import FakeServer, serve_fake

DESKTOP = Task(task_id=DESKTOP_TASK, instruction="Nothing.", level=1, infeasible=True)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with serve_fake(size=3, extra_tasks=[DESKTOP]) as server:
        yield server


@pytest.fixture
async def provider(server: FakeServer) -> AsyncIterator[EnvdProvider]:
    provider = EnvdProvider(server.address)
    yield provider
    await asyncio.to_thread(provider.stop_emulator, "envd")


def live(server: FakeServer) -> dict[str, str]:
    """Return the template digests of live episodes, by episode id."""
    return {info.episode_id: info.origin.template_digest for info in server.service.list_episodes()}


def parents(server: FakeServer) -> dict[str, str]:
    """Return the parents of live episodes, by episode id."""
    return {info.episode_id: info.parent_episode_id for info in server.service.list_episodes()}


async def test_a_machine_is_an_episode_that_stop_closes(server: FakeServer, provider: EnvdProvider) -> None:
    path = EnvdManager().get_vm_path(os_type="Ubuntu", region=None, screen_size=(1280, 800))
    await asyncio.to_thread(provider.start_emulator, path, True, "Ubuntu")
    await asyncio.to_thread(provider.start_emulator, path, True, "Ubuntu")
    assert len(live(server)) == 1
    host, *ports = provider.get_ip_address(path).split(":")
    assert host == "127.0.0.1"
    assert len(ports) == 4
    assert all(port.isdigit() for port in ports)
    await asyncio.to_thread(provider.stop_emulator, path)
    await asyncio.to_thread(provider.stop_emulator, path)
    assert live(server) == {}


async def test_the_ports_of_the_service_and_of_vlc_lead_to_those_of_the_guest(
    provider: EnvdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(argv: tuple[str, ...], stdin: bytes) -> bytes:
        assert stdin.startswith(b"GET /requests/status.xml")
        return f"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{argv[-1]}".encode()

    monkeypatch.setattr(provider, "_run", run)
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    host, server_port, _, _, vlc_port = provider.get_ip_address("envd").split(":")
    async with aiohttp.ClientSession() as http:
        for port, expected in ((server_port, "5000"), (vlc_port, "8080")):
            async with http.get(f"http://{host}:{port}/requests/status.xml") as response:
                assert await response.text() == expected


async def test_revert_creates_another_fork_of_the_same_state(server: FakeServer, provider: EnvdProvider) -> None:
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    before = live(server)
    address = provider.get_ip_address("envd")
    assert await asyncio.to_thread(provider.revert_to_snapshot, "envd", "init_state") == "envd"
    after = live(server)
    assert set(before) & set(after) == set()
    assert list(before.values()) == list(after.values())
    assert provider.get_ip_address("envd") == address


async def test_revert_to_a_saved_state_forks_it(server: FakeServer, provider: EnvdProvider) -> None:
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    (first,) = parents(server)
    await asyncio.to_thread(provider.save_state, "envd", "halfway")
    (saved,) = set(parents(server)) - {first}
    assert parents(server)[saved] == first
    for _ in range(2):
        await asyncio.to_thread(provider.revert_to_snapshot, "envd", "halfway")
        (current,) = set(parents(server)) - {saved}
        assert parents(server)[current] == saved
    await asyncio.to_thread(provider.revert_to_snapshot, "envd", "init_state")
    (current,) = set(parents(server)) - {saved}
    assert parents(server)[current] == ""


async def test_a_pool_without_guest_access_is_refused_at_the_start_and_keeps_no_machine(
    server: FakeServer, provider: EnvdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.pool, "settings", server.pool.settings.model_copy(update={"allow_guest_access": False}))
    with pytest.raises(ProviderError, match=r"ask the operator to set allow_guest_access \(PERMISSION_DENIED\)$"):
        await asyncio.to_thread(provider.start_emulator, "envd", True)
    assert live(server) == {}


async def test_a_pool_whose_guests_stop_between_calls_is_reported(
    provider: EnvdProvider, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    assert "pool fake: its guests stop between calls" in caplog.text


async def test_an_error_of_the_daemon_is_one_line(server: FakeServer) -> None:
    provider = EnvdProvider(server.address, pool="nope")
    with pytest.raises(ProviderError) as caught:
        await asyncio.to_thread(provider.start_emulator, "envd", True)
    text = "".join(traceback.format_exception(caught.value))
    assert str(caught.value).startswith(
        f"envd at {server.address}: pool 'nope': not found, needed by task osworld/desktop"
    )
    assert "_InactiveRpcError" not in text
    assert "\n" not in str(caught.value)


async def test_get_ip_address_requires_a_machine(server: FakeServer) -> None:
    with pytest.raises(RuntimeError, match="call start_emulator"):
        EnvdProvider(server.address).get_ip_address("envd")
