"""100 episodes of each protocol by the system's own client, from its checkout, on drawn desktops.

A module of a checkout is loaded by its path, because its package needs GPUs, Ray or torch. Names that it imports from
such packages without using them here are replaced by empty ones.
"""

import asyncio
import importlib.util
import json
import os
import sys
import types
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path
from typing import Any

import pytest

from envd.api.security.tokens import new_token
from envd.base.config import SecurityConfig
from envd.cli.certs import make_development_certs, write_certs
from tests.support.compat import CompatWorld, compat_world
from trainer.adapters.areal import pssdk

pytestmark = [pytest.mark.seeds, pytest.mark.long, pytest.mark.timeout(600)]
SEEDS = Path(os.environ.get("SEEDS", ""))
COUNT = 100
TASK = {"id": "fake/count-to-five"}
SCREEN = (1280, 800)
HALF = {1.0: COUNT // 2, 0.0: COUNT // 2}


def client_of(path: str, monkeypatch: pytest.MonkeyPatch, **names: dict[str, Any]) -> Any:
    """Load a module of a checkout.

    Args:
        path: Below `SEEDS`.
        monkeypatch: Removes the modules afterwards.
        names: Modules that it imports and is not to have, with underscores for dots, and their attributes.
    """
    file = SEEDS / path
    if not file.is_file():
        pytest.fail(f"SEEDS {SEEDS}: no {path}; clone the repository that docs/evidence/clients.md names for it")
    for dashed, attributes in names.items():
        parts = dashed.split("__")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            module = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            if count > 1:
                setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module)
        vars(sys.modules[".".join(parts)]).update(attributes)
    name = f"seed_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


async def played(episode: Callable[[int], float]) -> Counter[float]:
    """Play the episodes in four threads at once; any error of a client fails the test."""

    def play() -> Counter[float]:
        with ThreadPoolExecutor(4) as pool:
            return Counter(pool.map(episode, range(COUNT)))

    return await asyncio.to_thread(play)


@pytest.fixture
async def world() -> AsyncIterator[CompatWorld]:
    async with compat_world(size=2, capacity=4, as_processes=True) as world:
        yield world


async def test_slime_osworld(world: CompatWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSWORLD_SERVER_URL", f"http://{world.addresses['slime-osworld']}")
    client = client_of("Slime-OSWorld/slime_osworld/env.py", monkeypatch, slime__utils__types={"Sample": object})

    def episode(index: int) -> float:
        env = client.HTTPRemoteDesktopEnv(
            provider_name="docker",
            os_type="Ubuntu",
            action_space="pyautogui",
            screen_size=SCREEN,
            headless=True,
            require_a11y_tree=True,
        )
        assert env.reset(TASK)["screenshot"].size == SCREEN
        for action in ("pyautogui.click(819, 100, clicks=3)", "WAIT"):
            _, _, done, info = env.step(action, pause=0)
            assert (done, info) == (False, {})
        assert "error" in env.step("import os", pause=0)[3]
        if index % 2 == 0:
            env.step("pyautogui.moveTo(819,100); pyautogui.doubleClick()", pause=0)
        assert env.step("DONE")[2]
        score = env.evaluate()
        env.close()
        return float(score)

    assert await played(episode) == HALF
    assert world.server.service.list_episodes() == []


async def test_areal(world: CompatWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    logging = {"getLogger": getLogger}
    path = "AReaL/examples/osworld/workflow/remote_desktop_env.py"
    client = client_of(path, monkeypatch, areal__utils__logging=logging)

    def episode(index: int) -> float:
        url = f"http://{world.addresses['areal']}"
        env = client.RemoteDesktopEnv(url, screen_size=SCREEN, require_a11y_tree=bool(index % 2))
        seen = env.reset(task_config=TASK)
        assert seen["screenshot"].startswith(b"\x89PNG")
        assert (seen["accessibility_tree"] is not None) == bool(index % 2)
        assert env.step("pyautogui.click(819, 100, clicks=3)")[2:] == (False, {})
        assert "error" in env.step("garbage")[3]
        if index % 2 == 0:
            env.step("pyautogui.click(819,100)\ntime.sleep(0.1)\npyautogui.click()")
        assert env.step("DONE")[2]
        score = env.evaluate()
        assert env.evaluate() == score
        env.close()
        return float(score)

    assert await played(episode) == HALF
    assert world.server.service.list_episodes() == []


async def test_areal_gateway(world: CompatWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pssdk", pssdk)
    path = "AReaL/examples/osworld/workflow/gateway_sandbox.py"
    client = client_of(path, monkeypatch, desktop_env__controllers__python={"PythonController": object})

    def episode(index: int) -> float:
        url = f"http://{world.addresses['areal-sandbox']}"
        tool = client._RetryingClusterTool(
            cluster_endpoint=url, application_secret_token="", session_id=None, global_call_timeout=60
        )
        tool.sandbox_start({"task_id": "fake/save-note"})
        transport = client._GatewayTransport(url, "", tool.session_id, 60)
        setup = client.GatewaySandboxSetupController(transport, str(tmp_path / str(index)))
        echo = {"type": "execute", "parameters": {"command": ["echo", "hello"]}}
        assert setup.setup([echo, {"type": "sleep", "parameters": {"seconds": 0}}])
        controller = client._make_python_controller(transport)
        assert controller.get_screenshot().startswith(b"\x89PNG")
        assert "<desktop-frame" in controller.get_accessibility_tree()
        tool.sandbox_stop()
        return 0.0

    # Its score is computed by the client, from OSWorld's package.
    assert await played(episode) == {0.0: COUNT}
    assert world.server.service.list_episodes() == []


async def test_windows_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certs = write_certs(tmp_path / "certs", make_development_certs([], now=datetime.now(UTC)))
    token = new_token("recipe", "run")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{token.line}\n", encoding="utf-8")
    tokens.chmod(0o600)
    monkeypatch.setenv("SSL_CERT_FILE", str(certs["ca"]))
    recipe = "multinode-training-guide/slime/custom/windows_computer_use"
    vm_client = client_of(f"{recipe}/vm_client.py", monkeypatch)
    env_windows = client_of(f"{recipe}/env_windows.py", monkeypatch)
    # Only its pauses are left out.
    monkeypatch.setattr(env_windows, "time", types.SimpleNamespace(sleep=lambda _: None))
    security = SecurityConfig(tls_cert=certs["server"], tls_key=certs["server_key"], tokens_file=tokens)
    async with compat_world(size=2, capacity=4, security=security, names=["windows-vm"], as_processes=True) as world:
        base = f"{world.addresses['windows-vm']}/token/{token.secret}"

        def episode(index: int) -> float:
            body = json.dumps({"task_id": "fake/save-note"}).encode()
            request = urllib.request.Request(f"https://{base}/vm", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as response:  # noqa: S310 -- our own server
                opened = json.load(response)
            vm = vm_client.WindowsVM(base + opened["path"])
            vm.wait_ready(timeout=10)
            env = env_windows.WindowsComputerUseEnv(
                target_text="Hello, fake desktop!", output_path="/home/user/note.txt", vm=vm
            )
            seen, _ = env.reset()
            assert seen["multi_modal_data"]["image"]
            assert "Typed 20" in env.step('<action>type "Hello, fake desktop!"</action>')[0]["obs_str"]
            if index % 2 == 0:
                env.step("<action>sendkey ctrl-s</action>")
            assert "stdout" not in vm.exec("id")
            _, done, info = env.step("<done/>")
            assert done
            assert "error" not in vm.shutdown()
            return float(info["reward"] == 1.0)

        assert await played(episode) == HALF
        assert world.server.service.list_episodes() == []
