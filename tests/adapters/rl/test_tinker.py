"""tinker-cookbook's own group rollouts on drawn desktops, with its renderer of Qwen3-VL and a scripted policy."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from transformers import AutoProcessor, AutoTokenizer

from cuaenv.client import TaskNotFound, Unauthenticated
from tests.support.desktops import DrawnDesktops
from trainer.adapters.session import SessionSettings, SessionVoid
from trainer.adapters.tinker import DesktopGroupBuilder
from trainer.agent.loop import play_episode
from trainer.learn.checkpoint import write_checkpoint

# Warnings of the frameworks are not ours.
pytestmark = pytest.mark.filterwarnings("default")


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


#: The box Enabled; points are thousandths.
CLICK = call(action="left_click", coordinate=[642, 209])
DONE = call(action="terminate", status="success")
Plan = list[str | Callable[[], Any]]


class Scripted(TokenCompleter):  # type: ignore[misc]
    """Gives each rollout the replies of the next plan; a callable runs before the reply after it."""

    def __init__(self, renderer: Renderer, *plans: Plan) -> None:
        self._renderer = renderer
        self._plans = [list(plan) for plan in plans]
        self._playing: dict[Any, Plan] = {}
        self.prompts: list[Any] = []

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        self.prompts.append(model_input)
        rollout = asyncio.current_task()
        if rollout not in self._playing:
            self._playing[rollout] = self._plans.pop(0)
        reply = self._playing[rollout].pop(0)
        while not isinstance(reply, str):
            await asyncio.to_thread(reply)
            reply = self._playing[rollout].pop(0)
        ids = self._renderer.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return TokensWithLogprobs(tokens=ids, maybe_logprobs=[0.0] * len(ids), stop_reason="stop")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    images = AutoProcessor.from_pretrained(model, trust_remote_code=True).image_processor
    return get_renderer("qwen3_vl_instruct", AutoTokenizer.from_pretrained(model), images)


def builder_of(desktops: DrawnDesktops, renderer: Renderer, size: int, **row: Any) -> DesktopGroupBuilder:
    settings = SessionSettings.connect(desktops.address)
    return DesktopGroupBuilder(
        row={"task_id": "fake/enable"} | row, group_size=size, renderer=renderer, settings=settings
    )


async def test_a_group_starts_on_forks_of_one_state_and_has_its_scores(
    desktops: DrawnDesktops, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = set()

    def noted(episode: Any, *arguments: Any, **options: Any) -> Any:
        groups.add(episode.group_id)
        return play_episode(episode, *arguments, **options)

    monkeypatch.setattr("trainer.adapters.tinker.play_episode", noted)
    policy = Scripted(renderer, [CLICK, DONE], [DONE], ["I would click.", CLICK, DONE])
    group = await do_group_rollout(builder_of(desktops, renderer, 3), policy)
    assert sorted(group.get_total_rewards()) == [0.0, 1.0, 1.0]
    assert len(groups) == 1
    assert sorted(len(each.transitions) for each in group.trajectories_G) == [1, 2, 3]
    assert {each.stop_reason for each in group.trajectories_G} == {"completed"}
    # Each prompt holds its screenshots; those of the policy are what is trained on.
    assert any(type(chunk).__name__ == "ImageChunk" for chunk in policy.prompts[0].chunks)
    assert all(prompt.length > 0 for prompt in policy.prompts)


async def test_a_lost_machine_fails_the_group(desktops: DrawnDesktops, renderer: Renderer) -> None:
    policy = Scripted(renderer, [CLICK, desktops.kill_used_machines, CLICK])
    with pytest.raises(SessionVoid, match="machine"):
        await do_group_rollout(builder_of(desktops, renderer, 1), policy)


async def test_a_machine_lost_before_its_evaluation_fails_the_group(
    desktops: DrawnDesktops, renderer: Renderer
) -> None:
    policy = Scripted(renderer, [CLICK, desktops.kill_used_machines, DONE])
    with pytest.raises(SessionVoid):
        await do_group_rollout(builder_of(desktops, renderer, 1), policy)


async def test_a_retry_replaces_a_lost_rollout(desktops: DrawnDesktops, renderer: Renderer) -> None:
    policy = Scripted(renderer, [CLICK, desktops.kill_used_machines, CLICK], [CLICK, DONE])
    group = await do_group_rollout(builder_of(desktops, renderer, 1), policy, strategy=RetryOnFailure(max_retries=1))
    assert group.get_total_rewards() == [1.0]
    assert [error.error_type for error in group.rollout_errors] == ["SessionVoid"]


async def test_a_cancelled_group_leaves_no_machine(desktops: DrawnDesktops, renderer: Renderer) -> None:
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note() -> None:
        loop.call_soon_threadsafe(reached.set)

    plans: list[Plan] = [[CLICK, note, call(action="wait", time=60)] for _ in range(2)]
    policy = Scripted(renderer, *plans)
    rollout = asyncio.create_task(do_group_rollout(builder_of(desktops, renderer, 2), policy))
    await reached.wait()
    assert await asyncio.to_thread(lambda: desktops.leased_count) == 2
    rollout.cancel()
    await asyncio.wait({rollout})
    assert rollout.cancelled()


async def test_the_example_of_the_docs(
    desktops: DrawnDesktops, renderer: Renderer, example: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVD_TARGET", desktops.address)
    names: dict[str, Any] = {}
    exec(example("tinker-cookbook"), names)  # noqa: S102 -- our own page
    policy = Scripted(renderer, [CLICK, DONE], [DONE])
    assert sorted(await names["rewards"](policy, renderer)) == [0.0, 1.0]


async def test_a_wrong_token_fails_the_group(guarded_address: str, renderer: Renderer) -> None:
    settings = SessionSettings.connect(guarded_address, token="wrong")  # noqa: S106
    builder = DesktopGroupBuilder(row={"task_id": "fake/enable"}, group_size=1, renderer=renderer, settings=settings)
    with pytest.raises(Unauthenticated):
        await do_group_rollout(builder, Scripted(renderer, [DONE]))


async def test_wrong_input(desktops: DrawnDesktops, renderer: Renderer) -> None:
    with pytest.raises(TaskNotFound):
        await do_group_rollout(builder_of(desktops, renderer, 1, task_id="fake/none"), Scripted(renderer, [DONE]))
    builder = builder_of(desktops, renderer, 1)
    (env,) = await builder.make_envs()
    with pytest.raises(RuntimeError, match="has ended"):
        await env.step([1])
    await env.initial_observation()
    done = renderer.tokenizer.encode(DONE)
    assert (await env.step(done)).episode_done
    with pytest.raises(RuntimeError, match="has ended"):
        await env.step(done)
    await builder.cleanup()
