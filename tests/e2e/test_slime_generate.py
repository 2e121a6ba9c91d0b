"""`trainer.slime.generate` over a real socket, with doubles of slime: a sample comes back, whatever happens."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from envd.testing.server import FakeServer, serve_fake
from trainer.agent.grammars import grammar
from trainer.client import Action, Click, Done
from trainer.slime.generate import generate
from trainer.slime.samples import facts_of
from trainer.testing.slime import IMAGE, Sample, ScriptedEngine, Tokenizer, stand_in_slime
from trainer.testing.slime_job import slime_args

TASK = "fake/count-to-five"
SAY = grammar("qwen3-vl").render
AGENT = {"max_turns": 4, "prompt_tokens": 8192, "reply_tokens": 400, "image_max_pixels": 65_536, "timeout_s": 60.0}
PARAMS = {"temperature": 1.0, "max_new_tokens": 400}


def counting(prompt: str) -> str:
    """Play the task without a mistake."""
    plan: list[list[Action]] = [[Click(640, 125, count=3)], [Click(640, 125, count=2)], [Done()]]
    return SAY(plan[prompt.count("<|im_start|>assistant\n") - 1])


class World:
    """A served fake, doubles of slime, and samples for them."""

    def __init__(self, server: FakeServer, engine: ScriptedEngine, state: SimpleNamespace) -> None:
        self.server = server
        self.engine = engine
        self.state = state

    def args(self, *, agent: dict[str, Any] | None = None, envd: dict[str, Any] | None = None, **changed: Any) -> Any:
        mapping = {"hosts": [self.server.address], "engine_timeout_s": 20.0, "engine_retries": 1}
        return slime_args({**mapping, **(envd or {}), "agent": {**AGENT, **(agent or {})}}, **changed)

    async def leased_count(self) -> int:
        return self.server.pool.statistics().leased_count


@asynccontextmanager
async def world(say: Callable[[str], str] = counting, **options: Any) -> AsyncIterator[World]:
    engine = ScriptedEngine(say)
    async with serve_fake(**{"size": 2, "capacity": 8, **options}) as server:
        with stand_in_slime(engine) as state:
            yield World(server, engine, state)


def group_of(count: int, *, group_index: int = 0) -> list[Sample]:
    return [
        Sample(group_index=group_index, index=group_index * 100 + member, metadata={"task_id": TASK})
        for member in range(count)
    ]


async def test_a_sample_has_the_engines_tokens_and_the_tasks_score() -> None:
    async with world() as there:
        (sample,) = group_of(1)
        result = await generate(there.args(n_samples_per_prompt=1), sample, PARAMS)
    assert result is sample
    assert (sample.status.name, sample.reward, sample.metadata["raw_reward"]) == ("COMPLETED", 1.0, 1.0)
    said = [counting("<|im_start|>assistant\n" * turn) + "<|im_end|>" for turn in (1, 2, 3)]
    tokenizer = Tokenizer()
    trained = [
        token
        for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask or (), strict=True)
        if mask
    ]
    assert trained == [token for text in said for token in tokenizer.encode(text)]
    assert sample.weight_versions == ["7"] * 3
    assert sample.multimodal_train_inputs is not None
    grids = sample.multimodal_train_inputs["image_grid_thw"]
    assert sample.tokens.count(tokenizer.convert_tokens_to_ids(IMAGE)) == sum(h * w // 4 for _, h, w in grids)
    assert facts_of(sample)["reason"] == "done"
    assert PARAMS == {"temperature": 1.0, "max_new_tokens": 400}, "slime shares these among samples"


async def test_each_prompt_is_the_one_before_it_and_more() -> None:
    async with world() as there:
        await generate(there.args(n_samples_per_prompt=1), group_of(1)[0], PARAMS)
        prompts = [request["input_ids"] for request in there.engine.requests]
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
