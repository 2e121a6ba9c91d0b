"""The provider of machines for OSWorld's DesktopEnv on real machines: their ports, commands, and reverts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from envd.base.errors import ImageNotFound
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.catalogue import IMAGE
from envd.integrations.osworld.desktop_machines import EnvdProvider, ProviderError
from tests.support.real_desktops import Backend

pytestmark = pytest.mark.timeout(600)

#: A page on the port of Chrome's DevTools.
SERVE = "cd /tmp && echo page > index.html && exec python3 -m http.server 9222 --bind 127.0.0.1"


@pytest.fixture
async def provider(real_backend: Backend, vm_state_dir: Path) -> AsyncIterator[EnvdProvider]:
    try:
        ImageCatalogue(real_backend.cache_dir).disk_image(IMAGE)
    except ImageNotFound as error:
        pytest.skip(str(error))
    async with real_backend.osworld_machines(2, state_dir=vm_state_dir) as address:
        provider = EnvdProvider(address)
        try:
            yield provider
        finally:
            await asyncio.to_thread(provider.stop_emulator, "envd")


async def execute(provider: EnvdProvider, command: str, *, path: str = "execute") -> Any:
    """Run a command by OSWorld's service in the guest, as its controllers do."""
    host, port, *_ = provider.get_ip_address("envd").split(":")
    body = {"command": ["bash", "-c", command], "shell": False}
    async with aiohttp.ClientSession() as http, http.post(f"http://{host}:{port}/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json(content_type=None) if path == "execute" else None


async def test_desktop_env_has_its_ports_commands_and_reverts(real_backend: Backend, provider: EnvdProvider) -> None:
    await asyncio.to_thread(provider.start_emulator, "envd", True)
    done = await execute(provider, "echo kept > ~/note; python3 -c 'import pyautogui; print(*pyautogui.size())'")
    assert (done["returncode"], done["output"].strip()) == (0, "1280 800")
    host, server_port, chromium_port, *_ = provider.get_ip_address("envd").split(":")
    await execute(provider, SERVE, path="setup/launch")
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        async with http.get(f"http://{host}:{server_port}/screenshot") as response:
            assert (await response.read()).startswith(b"\x89PNG")
        while True:
            try:
                async with http.get(f"http://{host}:{chromium_port}/") as response:
                    assert await response.text() == "page\n"
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)  # the program is starting
    if not real_backend.is_qemu:
        with pytest.raises(ProviderError, match="cannot be copied"):
            await asyncio.to_thread(provider.save_state, "envd", "halfway")
    await asyncio.to_thread(provider.revert_to_snapshot, "envd", "init_state")
    assert (await execute(provider, "cat ~/note"))["returncode"] != 0
