"""Rollouts of ablations on served drawn desktops: lost machines, groups of other seeds, and recorded episodes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Click, PressKeys
from tests.support.counting import AGENT, PARAMS, SAY, TASK, counting, turn_in
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Sample, ScriptedEngine, stand_in_args, stand_in_slime
from tests.tools.learning import replay
from tests.tools.learning.arms import generate
from trainer.learn.record import shares_of_all
from trainer.slime.hooks import normalize_rewards
from trainer.slime.play.samples import facts_of, is_void


@asynccontextmanager
async def world(reply: Callable[[str], str] = counting) -> AsyncIterator[FakeServer]:
    async with serve_fake(size=4, capacity=8) as server:
        with stand_in_slime(ScriptedEngine(reply)):
            yield server


def args_of(server: FakeServer, **changed: Any) -> Any:
    envd = {"hosts": [server.address], "engine_timeout_s": 20.0, "engine_retries": 1, "attempts": 1, "agent": AGENT}
    envd["halt"] = {"above": {}}
    args = stand_in_args(envd, n_samples_per_prompt=1, rollout_seed=1)
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def samples_of(count: int, *, task: str = TASK) -> list[Sample]:
    return [Sample(group_index=index, index=index, metadata={"task_id": task}) for index in range(count)]


@pytest.mark.parametrize("as_zero", [False, True])
async def test_a_lost_machine_is_void_or_by_request_a_zero(as_zero: bool) -> None:
    """Some of eight samples fail, at different turns; the same ones in both ways of counting."""
    async with world() as server:
        args, samples = args_of(server, fault_share=0.6, faults_as_zero=as_zero), samples_of(8)
        await asyncio.gather(*(generate(args, sample, PARAMS) for sample in samples))
    if as_zero:
        lost = [index for index, sample in enumerate(samples) if sample.reward == 0]
        assert not any(map(is_void, samples))
        assert {facts_of(samples[index])["reason"] for index in lost} == {"injected"}
        assert all(any(samples[index].loss_mask or ()) for index in lost), "its replies are trained"
    else:
        lost = [index for index, sample in enumerate(samples) if is_void(sample)]
        assert {facts_of(samples[index])["void"] for index in lost} == {"MachineLost"}
        assert normalize_rewards(args, samples)[1] == [0.0] * 8
    assert lost == [1, 2, 3, 5, 7]
    assert {facts_of(samples[index])["turns"] for index in lost} == {1, 2, 3}
    assert all(sample.reward == 1 for sample in samples if sample.index not in lost)


def escaping(prompt: str) -> str:
    """Click once, then press the chord that reboots the guest."""
    turn = turn_in(prompt)
    return SAY([Click(640, 125)] if turn == 1 else [PressKeys(("ctrl", "alt", "delete"))])


@pytest.mark.parametrize("as_void", [False, True])
async def test_an_escape_is_scored_or_by_request_void(as_void: bool) -> None:
    (sample,) = samples_of(1)
    async with world(escaping) as server:
        await generate(args_of(server, escapes_as_void=as_void), sample, PARAMS)
    facts = facts_of(sample)
    if as_void:
        assert (is_void(sample), facts["void"], facts["turns"]) == (True, "EscapeLost", 2)
    else:
        assert (is_void(sample), facts["guest_end_cause"], sample.reward) == (False, "REBOOT", -0.1)
    others: list[dict[str, Any]] = [{"task_score": 1.0}, {"void": "MachineLost"}]
    assert shares_of_all([facts, *others]) == pytest.approx({"solved_frac": 1 / 3, "escape_frac": 1 / 3})


async def test_an_evaluation_loses_no_machine() -> None:
    async with world() as server:
        (sample,) = samples_of(1)
        await generate(args_of(server, fault_share=0.999), sample, PARAMS, evaluation=True)
    assert sample.reward == 1.0


async def test_members_of_a_drawn_group_have_other_seeds_of_their_template() -> None:
    samples = samples_of(4, task="drawn/press?seed=7")
    async with world() as server:
        args = args_of(server, drawn_seeds=1000)
        await asyncio.gather(*(generate(args, sample, PARAMS) for sample in samples))
        first = [sample.metadata["task_id"] for sample in samples]
        await asyncio.gather(*(generate(args, sample, PARAMS) for sample in samples))
    assert [sample.metadata["task_id"] for sample in samples] == first, "a repeated sample has the same task"
    assert len(set(first)) == 4
    assert {task.partition("?")[0] for task in first} == {"drawn/press"}


async def test_a_recorded_episode_has_a_frame_before_each_reply_and_one_at_the_end(tmp_path: Path) -> None:
    (sample,) = samples_of(1)
    async with world() as server:
        await replay.generate(args_of(server, save=str(tmp_path)), sample, PARAMS, evaluation=True)
    episode = json.loads((tmp_path / "played" / "episode.json").read_text())
    assert (episode["task_id"], episode["score"], episode["error"]) == (TASK, 1.0, "")
    assert [turn["frame"] for turn in episode["turns"]] == [0, 1, 2]
    assert episode["turns"][0]["text"] == counting("<|im_start|>assistant\n")
    assert episode["turns"][0]["point"] == pytest.approx([0.64, 0.125], abs=0.01)
    assert episode["turns"][2]["point"] is None
    assert len(list((tmp_path / "played").glob("*.png"))) == 4
