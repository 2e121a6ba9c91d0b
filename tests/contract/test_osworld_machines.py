"""The provider of machines for OSWorld's DesktopEnv, over real gRPC to a server of fake machines."""

import asyncio
import os
import shutil
import site
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from envd.base.config import Config
from envd.integrations.osworld import DESKTOP_TASK
from envd.integrations.osworld.desktop_machines import EnvdProvider, ProviderError
from envd.integrations.osworld.environment import Environment
from envd.tasks.model import Task
from tests.support.server import FakeServer, serve_fake

PATCH = Path(__file__).parents[2] / "deploy/upstream/osworld/provider.patch"
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
    return {info.episode_id: info.spec.origin.template_digest for info in server.service.list_episodes()}


def parents(server: FakeServer) -> dict[str, str]:
    """Return the parents of live episodes, by episode id."""
    return {info.episode_id: info.spec.parent_episode_id for info in server.service.list_episodes()}


async def test_a_machine_is_an_episode_that_stop_closes(server: FakeServer, provider: EnvdProvider) -> None:
    path = provider.get_vm_path(os_type="Ubuntu", region=None, screen_size=(1280, 800))
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


async def test_the_ports_lead_to_those_of_the_present_machines_guest(
    server: FakeServer, provider: EnvdProvider
) -> None:
    async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"in the guest")
        writer.close()

    server.hypervisor.services |= {9222: service, 8080: service}
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    for _ in range(2):
        host, server_port, chromium_port, _, vlc_port = provider.get_ip_address("envd").split(":")
        for port in (chromium_port, vlc_port):
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b"in the guest"
            writer.close()
        async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{server_port}/screenshot") as response:
            assert response.content_type == "image/png"
        await asyncio.to_thread(provider.revert_to_snapshot, "envd", "init_state")


async def test_stop_frees_the_ports_and_ends_their_connections(server: FakeServer, provider: EnvdProvider) -> None:
    server.hypervisor.services[9222] = server.hypervisor.services[7]
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    port = int(provider.get_ip_address("envd").split(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"!")
    assert await reader.readexactly(1) == b"!"
    await asyncio.to_thread(provider.stop_emulator, "envd")
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_token_is_not_sent_to_another_host_in_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVD_TOKEN", "secret")
    provider = EnvdProvider("192.0.2.1:50051")
    with pytest.raises(ProviderError, match="would get the token in clear text"):
        await asyncio.to_thread(provider.start_emulator, "envd", True)


async def test_revert_creates_another_fork_of_the_same_state(server: FakeServer, provider: EnvdProvider) -> None:
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    before = live(server)
    assert await asyncio.to_thread(provider.revert_to_snapshot, "envd", "init_state") == "envd"
    after = live(server)
    assert set(before) & set(after) == set()
    assert list(before.values()) == list(after.values())


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


#: A user of OSWorld with the provider; `easyocr`, which needs torch, is not installed.
USE = """
import sys, types
sys.modules["easyocr"] = types.ModuleType("easyocr")
from desktop_env.desktop_env import DesktopEnv

env = DesktopEnv(provider_name="envd", action_space="pyautogui", cache_dir=sys.argv[1], require_a11y_tree=False)
print(env.is_environment_used, env.controller.get_screenshot()[1:4].decode())
env.provider.revert_to_snapshot(env.path_to_vm, env.snapshot_name)
env.close()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_osworlds_own_package_takes_the_provider_that_we_offer_it(server: FakeServer, tmp_path: Path) -> None:
    environment = Environment(Config().cache_dir)
    if not environment.is_installed:
        pytest.skip("OSWorld is not installed; run envd osworld install")
    [package] = environment.python.parents[1].glob("lib/*/site-packages/desktop_env")
    shutil.copytree(package, tmp_path / "desktop_env")
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False)
    patched = await asyncio.to_thread(run, ["patch", "-p1", "-F0", "-i", str(PATCH)])
    assert patched.returncode == 0, patched.stdout
    # What `pip install 'envd-trainer[client]'` would add.
    for name in ("grpc", "google", "typing_extensions.py"):
        (tmp_path / name).symlink_to(Path(site.getsitepackages()[0]) / name)
    roots = [path for path in sys.path if (Path(path) / "envd").is_dir() or (Path(path) / "cuaenv").is_dir()]
    environ = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *roots]),
        "ENVD_ADDRESS": server.address,
        "HOME": str(tmp_path),
    }
    command = [str(environment.python), "-c", USE, str(tmp_path)]
    done = await asyncio.to_thread(run, command, env=environ)
    assert done.stdout.split("\n")[-2:] == ["False PNG", ""], done.stderr[-2000:]
    assert live(server) == {}
