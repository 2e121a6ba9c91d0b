"""The taskset and environment of verifiers, played by verifiers' own runner with a scripted model."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp.web
import pytest
import verifiers.v1 as vf

from cuaenv.client import Click, Done
from tests.support.desktops import DrawnDesktops
from tests.support.scripted_model import ScriptedModel, say_steps, served
from trainer.adapters.verifiers import DesktopConfig, DesktopEnv, DesktopEnvConfig, DesktopTaskset
from trainer.agent.settings import AgentSettings

TASK = "fake/enable"
GRAMMAR = AgentSettings().make_grammar()
SOLVE = say_steps([[Click(822, 167)], [Done()]], GRAMMAR)
GIVE_UP = say_steps([[Done()]], GRAMMAR)


class StreamingModel(ScriptedModel):
    """A scripted model that also streams, as verifiers asks."""

    async def complete(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        response = await super().complete(request)
        if response.status != 200 or not (await request.json()).get("stream"):
            return response
        whole = json.loads(response.text or "")
        choice = whole["choices"][0]
        deltas = [
            {"index": 0, "delta": choice["message"], "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
        ]
        same = {"id": "1", "created": 1, "model": "scripted", "object": "chat.completion.chunk"}
        events = [json.dumps({**same, "choices": [delta]}) for delta in deltas]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return aiohttp.web.Response(text=text, content_type="text/event-stream")


@asynccontextmanager
async def environment(
    desktops: DrawnDesktops, replies: Sequence[str], *, task: str = TASK, envd: str = "", **options: Any
) -> AsyncIterator[tuple[DesktopEnv, vf.ModelContext, ScriptedModel]]:
    model = StreamingModel({"Check the box Enabled.": replies})
    async with served(model) as url:
        config = DesktopEnvConfig(
            taskset=DesktopConfig(id="envd-desktop", envd=envd or desktops.address, tasks=[task]), **options
        )
        client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
        env = DesktopEnv(config)
        async with env.serving():
            yield env, vf.ModelContext(model="scripted", client=client, sampling=vf.SamplingConfig()), model


async def play(env: DesktopEnv, context: vf.ModelContext, count: int = 1) -> list[vf.Episode]:
    (task,) = list(env.taskset)
    return list(await asyncio.gather(*(env.run_slot(slot, context) for slot in env.slots(task, count))))


async def test_a_solved_task_is_rewarded_with_1(desktops: DrawnDesktops) -> None:
    async with environment(desktops, SOLVE) as (env, context, _):
        (episode,) = await play(env, context)
    assert episode.ok, episode.errors
    (trace,) = episode.traces
    assert (trace.reward, trace.metrics["turns"]) == (1.0, 2.0)


async def test_a_group_starts_on_forks_of_one_state_and_doing_nothing_is_rewarded_with_0(
    desktops: DrawnDesktops,
) -> None:
    groups: set[str] = set()
    async with environment(desktops, GIVE_UP, group_size=2) as (env, context, model):

        async def note() -> None:
            groups.update(episode.spec.group_id for episode in desktops.server.service.list_episodes())

        model.before_reply = note
        episodes = await play(env, context, count=2)
    assert [(episode.ok, episode.traces[0].rewards["score"].score) for episode in episodes] == [(True, 0.0)] * 2
    assert len(groups) == 1


async def test_a_lost_machine_is_an_error_of_the_sandbox_without_a_reward(desktops: DrawnDesktops) -> None:
    async with environment(desktops, SOLVE) as (env, context, model):

        async def kill() -> None:
            if model.asked_count > 1:
                desktops.kill_used_machines()

        model.before_reply = kill
        (episode,) = await play(env, context)
    assert not episode.ok
    assert [error.type for error in episode.errors] == ["SandboxError"]
    assert "MACHINE_LOST" in episode.errors[0].message or "lost" in episode.errors[0].message
    assert all(trace.rewards.get("score") is None for trace in episode.traces)


async def test_a_cancelled_episode_leaves_no_machine(desktops: DrawnDesktops) -> None:
    async with environment(desktops, SOLVE) as (env, context, model):
        asked = asyncio.Event()

        async def stall() -> None:
            asked.set()
            await asyncio.sleep(600)

        model.before_reply = stall
        episode = asyncio.create_task(play(env, context))
        await asyncio.wait_for(asked.wait(), 120)
        episode.cancel()
        await asyncio.wait({episode})
        assert episode.cancelled()


async def test_mistakes_are_errors_of_the_environment(desktops: DrawnDesktops) -> None:
    async with environment(desktops, SOLVE, task="fake/none") as (env, context, model):
        (episode,) = await play(env, context)
    assert [error.type for error in episode.errors] == ["EnvError"]
    assert "fake/none" in episode.errors[0].message
    assert (episode.traces, model.asked_count) == ([], 0)
    with pytest.raises(ValueError, match="names no tasks"):
        list(DesktopTaskset(DesktopConfig(id="envd-desktop", envd=desktops.address)))
    with pytest.raises(ValueError, match="images_per_row"):
        DesktopEnv(DesktopEnvConfig(taskset=DesktopConfig(id="envd-desktop"), agent={"images_per_row": 4}))


async def test_a_wrong_token_is_an_error_of_the_environment(
    desktops: DrawnDesktops, guarded_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVD_TOKEN", "wrong")
    async with environment(desktops, SOLVE, envd=guarded_address) as (env, context, _):
        (episode,) = await play(env, context)
    assert [error.type for error in episode.errors] == ["EnvError"]
    assert "token" in episode.errors[0].message


def test_a_suite_is_a_taskset(desktops: DrawnDesktops) -> None:
    tasks = list(DesktopTaskset(DesktopConfig(id="envd-desktop", envd=desktops.address, suite="fake")))
    assert TASK in {task.data.task_id for task in tasks}


async def test_the_example_on_the_page_runs(run_example: Callable[..., Awaitable[str]]) -> None:
    async with served(StreamingModel({"Check the box Enabled.": SOLVE})) as url:
        assert "True 1.0" in await run_example("verifiers", url=url.removesuffix("/v1"))
