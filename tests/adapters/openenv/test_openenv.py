"""The OpenEnv environment with OpenEnv's own server, client and validator."""

import asyncio
import base64
import io
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import uvicorn
from openenv import GenericEnvClient
from PIL import Image

import trainer.adapters.openenv as package
from tests.support.desktops import DrawnDesktops
from trainer.adapters.openenv import DesktopAction, DesktopOpenEnv
from trainer.adapters.openenv.server.app import make_app

TASK = "fake/enable"
BOX = {"action": "click", "x": 822, "y": 167}
DONE = {"action": "done"}


@contextmanager
def served(desktops: DrawnDesktops, **variables: str) -> Iterator[str]:
    """Serve the environment on loopback; return its URL."""
    app = make_app({"ENVD_TARGET": desktops.address, "ENVD_TASK": TASK, **variables})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            desktops.wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def act(*actions: dict[str, Any]) -> DesktopAction:
    return DesktopAction(actions=list(actions))


def connected(url: str) -> Any:
    return DesktopOpenEnv(base_url=url).sync()


def test_its_own_client_solves_a_task(desktops: DrawnDesktops) -> None:
    with served(desktops) as url, connected(url) as env:
        first = env.reset()
        assert first.observation.instruction == "Check the box Enabled."
        assert (first.observation.image.size, first.done, first.reward) == ((1280, 800), False, None)
        step = env.step(act(BOX))
        assert (step.done, step.reward, step.observation.errors) == (False, None, [""])
        assert step.observation.screenshot != first.observation.screenshot
        assert env.state().step_count == 1
        end = env.step(act(DONE))
        assert (end.done, end.reward, end.observation.end_reason) == (True, 1.0, "AGENT_DONE")
        assert env.reset(task="fake/save-note", pictures=False).observation.screenshot == ""


def test_doing_nothing_gives_0(desktops: DrawnDesktops) -> None:
    with served(desktops) as url, connected(url) as env:
        env.reset(task=TASK)
        assert env.step(act(DONE)).reward == 0.0


def test_a_lost_machine_gives_no_reward_and_the_reason(desktops: DrawnDesktops) -> None:
    with served(desktops) as url, connected(url) as env:
        env.reset()
        env.step(act(BOX))
        desktops.kill_used_machines()
        end = env.step(act(DONE))
        assert (end.done, end.reward) == (True, None)
        assert "MACHINE_LOST" in end.observation.metadata["void"]
        env.reset()
        assert env.step(act(BOX, DONE)).reward == 1.0


def test_sessions_of_a_group_start_on_forks_of_one_state(desktops: DrawnDesktops) -> None:
    with served(desktops) as url, connected(url) as one, connected(url) as two:
        group = {"task": "fake/append-line", "group": "g1", "group_size": 2}
        first, second = one.reset(**group), two.reset(**group)
        assert first.observation.screenshot == second.observation.screenshot
        episodes = desktops.server.service.list_episodes()
        assert len({episode.spec.group_id for episode in episodes}) == 1


def test_mistakes_are_errors_of_openenv_and_lose_nothing(desktops: DrawnDesktops) -> None:
    with served(desktops, ENVD_TASK="") as url, GenericEnvClient(base_url=url).sync() as env:
        for mistake, message in (
            (lambda: env.step({"actions": [DONE]}), "no episode is open"),
            (env.reset, "no task"),
            (lambda: env.reset(task="fake/none"), "fake/none"),
            (lambda: env.reset(task=TASK, group_size=0), "group_size is 0"),
        ):
            with pytest.raises(RuntimeError, match=message):
                mistake()
        env.reset(task=TASK)
        for malformed in ([], [{"action": "explode"}], [{"action": "click", "x": "left", "y": 1}]):
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                env.step({"actions": malformed})
        no_key = env.step({"actions": [{"action": "press", "keys": ["nokey"]}]})
        assert "key" in no_key.observation["errors"][0]
        assert env.step({"actions": [BOX, DONE]}).reward == 1.0
        with pytest.raises(RuntimeError, match="closed"):
            env.step({"actions": [BOX]})


def test_a_client_that_disconnects_in_a_step_leaves_no_machine(desktops: DrawnDesktops) -> None:
    async def leave(url: str) -> None:
        env = DesktopOpenEnv(base_url=url)
        await env.connect()
        await env.reset()
        step = asyncio.create_task(env.step(act(BOX, {"action": "wait", "seconds": 2})))
        await asyncio.to_thread(desktops.wait_until, lambda: desktops.used_count > 0)
        step.cancel()
        await asyncio.wait({step})
        await env.close()

    with served(desktops) as url:
        asyncio.run(leave(url))
        desktops.wait_returned()


def test_more_sessions_than_allowed_are_refused(desktops: DrawnDesktops) -> None:
    with served(desktops, ENVD_MAX_SESSIONS="1") as url, connected(url) as env:
        env.reset()
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED"), connected(url) as other:
            other.reset()


def rpc(url: str, method: str, **params: Any) -> Any:
    body: Any = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return requests.post(f"{url}/mcp", json=body, timeout=60).json()


def test_mcp_tools_return_pictures_as_images(desktops: DrawnDesktops) -> None:
    with served(desktops) as url:
        session = rpc(url, "openenv/session/create")["result"]["session_id"]
        tools = rpc(url, "tools/list", session_id=session)["result"]["tools"]
        assert {tool["name"] for tool in tools} == {"act", "look"}
        look = rpc(url, "tools/call", session_id=session, name="look", arguments={})
        assert "result" in look, look
        look = look["result"]
        text, picture = look["content"]
        assert text["text"] == "Check the box Enabled."
        assert (picture["type"], picture["mimeType"]) == ("image", "image/png")
        assert Image.open(io.BytesIO(base64.b64decode(picture["data"]))).size == (1280, 800)
        end = rpc(url, "tools/call", session_id=session, name="act", arguments={"actions": [BOX, DONE]})["result"]
        assert "score: 1.0" in end["content"][0]["text"]
        late = rpc(url, "tools/call", session_id=session, name="act", arguments={"actions": [BOX]})
        assert "error" in late
        rpc(url, "openenv/session/close", session_id=session)


def test_openenv_validates_the_package_and_a_running_server(desktops: DrawnDesktops) -> None:
    directory = Path(package.__file__).parent
    validate = [str(Path(sys.executable).parent / "openenv"), "validate"]
    done = subprocess.run([*validate, str(directory), "--level", "static"], capture_output=True, text=True, check=False)
    assert (done.returncode, "Verdict: PASS" in done.stdout) == (0, True), done.stdout
    with served(desktops) as url:
        done = subprocess.run([*validate, "--url", url], capture_output=True, text=True, check=False)
    assert (done.returncode, "Verdict: PASS" in done.stdout) == (0, True), done.stdout


def test_a_wrong_token_is_an_error_of_openenv(desktops: DrawnDesktops, guarded_address: str) -> None:
    with (
        served(desktops, ENVD_TARGET=guarded_address, ENVD_TOKEN="wrong") as url,  # noqa: S106 -- a wrong one
        connected(url) as env,
        pytest.raises(RuntimeError, match="token"),
    ):
        env.reset()


def test_a_malformed_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="ENVD_MAX_SESSIONS is many"):
        make_app({"ENVD_MAX_SESSIONS": "many"})


async def test_the_example_on_the_page_runs(
    desktops: DrawnDesktops, run_example: Callable[..., Awaitable[str]]
) -> None:
    with served(desktops) as url:
        assert "True 1.0" in await run_example("OpenEnv", url=url)
