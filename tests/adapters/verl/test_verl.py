"""verl's own agent-loop worker and TransferQueue on drawn desktops, with a tiny vision model's tokenizer and processor.

The worker is that of verl's v1 trainer, run in this process so that a scripted engine can kill machines.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.workers.rollout.replica import TokenOutput

from cuaenv.client import AsyncEnvClient, Click
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from tests.support.desktops import DrawnDesktops
from trainer.agent.loop import play_episode
from trainer.agent.starts import state_of
from trainer.config import InputError

# Warnings of the frameworks are not ours.
pytestmark = pytest.mark.filterwarnings("default")


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


#: The box Enabled; points are thousandths.
CLICK = call(action="left_click", coordinate=[642, 209])
DONE = call(action="terminate", status="success")
TARGET = "trainer.adapters.verl.DesktopAgentLoop"
Plan = list[str | Callable[[], Any]]


class Engine:
    """Gives each session the replies of the next plan; a callable runs before the reply after it."""

    def __init__(self, *plans: Plan) -> None:
        self.tokenizer: Any = None
        self.requests: list[dict[str, Any]] = []
        self.replies: dict[str, list[list[int]]] = {}
        self._plans = [list(plan) for plan in plans]
        self._playing: dict[str, Plan] = {}

    async def generate(self, request_id: str, **request: Any) -> TokenOutput:
        self.requests.append(request)
        if request_id not in self._playing:
            self._playing[request_id] = self._plans.pop(0)
        reply = self._playing[request_id].pop(0)
        while not isinstance(reply, str):
            await asyncio.to_thread(reply)
            reply = self._playing[request_id].pop(0)
        ids = self.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        self.replies.setdefault(request_id, []).append(ids)
        log_probs = [-0.25] * len(ids) if request["sampling_params"]["logprobs"] else None
        return TokenOutput(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={"global_steps": 7}
        )


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """verl's TransferQueue in a Ray cluster of its own."""
    # The queue's actors reserve more CPUs than a small machine has.
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    yield
    tq.close()
    ray.shutdown()


class Rollout:
    """A worker of verl, and its queue."""

    def __init__(self, desktops_address: str, model: Path, directory: Path, engine: Engine, **envd: Any) -> None:
        loops = directory / "loops.yaml"
        settings = {"hosts": [desktops_address], "attempts": 1, **envd}
        OmegaConf.save(OmegaConf.create([{"name": "desktop", "_target_": TARGET, "envd": settings}]), loops)
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={model}",
                    # The tiny checkpoint has a processor of its own.
                    "actor_rollout_ref.model.trust_remote_code=true",
                    "actor_rollout_ref.rollout.name=vllm",
                    "actor_rollout_ref.rollout.prompt_length=4096",
                    "actor_rollout_ref.rollout.response_length=8192",
                    "actor_rollout_ref.rollout.calculate_log_probs=true",
                    "actor_rollout_ref.rollout.agent.default_agent_loop=desktop",
                    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                ],
            )
        self.worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, engine)
        engine.tokenizer = self.worker.tokenizer

    async def start(self, uid: str, *, count: int, **row: Any) -> None:
        """Start the sessions of one prompt."""
        fields = {
            "uid": uid,
            "index": 0,
            "raw_prompt": [{"role": "user", "content": "Use the desktop."}],
            "__rollout_n__": count,
            "task_id": "fake/enable",
            **row,
        }
        stacked = {name: NonTensorStack(NonTensorData(value)) for name, value in fields.items()}
        batch = TensorDict({**stacked, "global_steps": NonTensorData(1)}, batch_size=1)
        await self.worker.generate_sequences(batch)

    async def finish(self, uid: str) -> tuple[str, dict[str, Any]]:
        """Wait for a prompt's sessions; return verl's status and its trajectories."""
        await asyncio.gather(*self.worker.background_tasks)
        tags = (await tq.async_kv_list("train"))["train"]
        status = tags[uid]["status"]
        keys = sorted(key for key in tags if key.startswith(f"{uid}_"))
        rows = {key: await tq.async_kv_batch_get(keys=[key], partition_id="train") for key in keys}
        await tq.async_kv_clear(keys=[uid, *keys], partition_id="train")
        return status, rows


@pytest.fixture
def make(queue: None, desktops: DrawnDesktops, model: Path, tmp_path: Path) -> Callable[..., Rollout]:
    return lambda engine, **envd: Rollout(desktops.address, model, tmp_path, engine, **envd)


def score_of(row: Any) -> float:
    return float(row["rm_scores"][0].sum())


async def test_a_group_starts_on_forks_of_one_state_and_has_its_scores(
    make: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = []

    async def noted(episode: Any, *arguments: Any, **options: Any) -> Any:
        origins.append((episode.group_id, episode.origin))
        return await play_episode(episode, *arguments, **options)

    monkeypatch.setattr("trainer.agent.attempts.play_episode", noted)
    engine = Engine([CLICK, DONE], [DONE], ["I would click.", CLICK, DONE])
    rollout = make(engine)
    await rollout.start("one", count=3)
    status, rows = await rollout.finish("one")
    assert status == "finished"
    assert sorted(map(score_of, rows.values())) == [0.0, 1.0, 1.0]
    assert len(origins) == 3
    assert len(set(origins)) == 1


async def test_trained_tokens_are_those_that_were_sampled(make: Callable[..., Rollout]) -> None:
    engine = Engine([CLICK, DONE])
    rollout = make(engine)
    await rollout.start("two", count=1)
    _, rows = await rollout.finish("two")
    (row,) = rows.values()
    mask = row["response_mask"][0]
    responses = row["responses"][0]
    (replies,) = engine.replies.values()
    assert responses[mask.bool()].tolist() == [token for reply in replies for token in reply]
    log_probs = row["rollout_log_probs"][0]
    assert set(log_probs[mask.bool()].tolist()) == {-0.25}
    assert set(log_probs[~mask.bool()].tolist()) == {0.0}
    # The second request had the whole row so far, with a picture for each screenshot.
    sent = engine.requests[1]
    whole = row["prompts"][0].tolist() + responses.tolist()
    assert sent["prompt_ids"] == whole[: len(sent["prompt_ids"])]
    assert len(sent["image_data"]) == 2
    assert row["multi_modal_inputs"][0]["image_grid_thw"].shape[0] == 2


async def test_a_lost_machine_is_left_out_of_its_group(make: Callable[..., Rollout], desktops: DrawnDesktops) -> None:
    engine = Engine([CLICK, desktops.kill_used_machines, CLICK])
    rollout = make(engine)
    await rollout.start("three", count=1)
    assert await rollout.finish("three") == ("failure", {})


async def test_a_machine_lost_before_its_evaluation_is_not_scored(
    make: Callable[..., Rollout], desktops: DrawnDesktops
) -> None:
    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()
    first: Plan = [CLICK, desktops.kill_used_machines, lambda: loop.call_soon_threadsafe(waiting.set), DONE]
    engine = Engine(first, [lambda: asyncio.run_coroutine_threadsafe(waiting.wait(), loop).result(60), DONE])
    rollout = make(engine)
    await rollout.start("four", count=2)
    status, rows = await rollout.finish("four")
    assert status == "failure"
    assert list(map(score_of, rows.values())) == [0.0], "only the member that did nothing is scored"


async def test_a_lost_machine_is_replaced(make: Callable[..., Rollout], desktops: DrawnDesktops) -> None:
    engine = Engine([CLICK, desktops.kill_used_machines, CLICK], [CLICK, DONE])
    rollout = make(engine, attempts=2)
    await rollout.start("five", count=1)
    status, rows = await rollout.finish("five")
    assert (status, list(map(score_of, rows.values()))) == ("finished", [1.0])


async def test_the_example_of_the_docs(make: Callable[..., Rollout]) -> None:
    page = (Path(__file__).parents[3] / "docs/adapters.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^## verl\n.*?^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (loop,) = OmegaConf.to_container(OmegaConf.create(text))
    assert (loop["name"], loop["_target_"]) == ("desktop", TARGET)
    assert loop["envd"].pop("hosts") == ["127.0.0.1:50051"]
    rollout = make(Engine([CLICK, DONE]), **loop["envd"])
    await rollout.start("ten", count=1)
    status, rows = await rollout.finish("ten")
    assert (status, list(map(score_of, rows.values()))) == ("finished", [1.0])


async def test_a_group_starts_in_the_state_of_its_row(
    make: Callable[..., Rollout], desktops: DrawnDesktops, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    stored = await asyncio.to_thread(lambda: DrawnDesktops(size=2, capacity=4, checkpoints=store))
    try:
        async with AsyncEnvClient(stored.address) as client, client.reset("fake/enable") as episode:
            await episode.step(Click(822, 167))
            state = await episode.checkpoint()
        rollout = make(Engine([DONE], [DONE]), hosts=[stored.address])
        await rollout.start("eleven", count=2, extra_info={"checkpoint": state_of(state)})
        status, rows = await rollout.finish("eleven")
        assert (status, list(map(score_of, rows.values()))) == ("finished", [1.0, 1.0])
    finally:
        await asyncio.to_thread(stored.close)


async def test_a_cancelled_prompt_leaves_no_machine(make: Callable[..., Rollout], desktops: DrawnDesktops) -> None:
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()
    plan: Plan = [CLICK, lambda: loop.call_soon_threadsafe(reached.set), call(action="wait", time=60)]
    rollout = make(Engine(list(plan), list(plan)))
    await rollout.start("six", count=2)
    await reached.wait()
    assert await asyncio.to_thread(lambda: desktops.leased_count) == 2
    (prompt,) = rollout.worker.background_tasks
    prompt.cancel()
    await asyncio.wait({prompt})
    await tq.async_kv_clear(keys=["six"], partition_id="train")


async def test_a_mistake_is_reported_and_opens_nothing(
    make: Callable[..., Rollout], caplog: pytest.LogCaptureFixture
) -> None:
    for row, message in (({"task_id": "fake/none"}, "fake/none"), ({"task_id": ""}, "no task id")):
        rollout = make(Engine())
        await rollout.start("seven", count=1, **row)
        assert await rollout.finish("seven") == ("failure", {})
        assert message in caplog.text


@pytest.mark.usefixtures("queue")
async def test_a_wrong_token_is_reported(
    guarded_address: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENVD_TOKEN", "wrong")
    rollout = Rollout(guarded_address, model, tmp_path, Engine())
    await rollout.start("eight", count=1)
    assert await rollout.finish("eight") == ("failure", {})
    assert "Unauthenticated" in caplog.text


async def test_wrong_settings_are_refused(make: Callable[..., Rollout], caplog: pytest.LogCaptureFixture) -> None:
    for envd, message in (({"agent": {"images_per_row": 4}}, "images_per_row is 4"), ({"agents": {}}, "agents")):
        rollout = make(Engine(), **envd)
        await rollout.start("nine", count=1)
        status, rows = await rollout.finish("nine")
        assert (status, rows) == ("failure", {})
        assert InputError.__name__ in caplog.text
        assert message in caplog.text
