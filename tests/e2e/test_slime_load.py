"""32 concurrent rollouts in one event loop complete, and lost ones do not affect the others."""

import asyncio
import statistics
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Done
from tests.support.counting import AGENT, PLAN, SAY, TASK, counting, turn_in
from tests.support.faulty import Faults
from tests.support.served import ServedDaemon
from tests.support.server import serve_fake
from tests.support.slime import Sample, ScriptedEngine, stand_in_args, stand_in_slime
from trainer.slime.hooks import generate, normalize_rewards
from trainer.slime.play.samples import facts_of, is_void

COUNT = 32
#: Concurrent rollouts slow each other down.
PATIENT = {**AGENT, "timeout_s": 900.0}
#: Input events of PLAN: a pointer movement, then 2 events a click. A machine dies at the next one.
SOLVING_INPUTS = 1 + 2 * 3 + 1 + 2 * 2
#: Index of the sample whose rollout runs.
current: ContextVar[int] = ContextVar("current")
CONFIG = f"""\
[hypervisor]
uri = "fake"

[pools.desktop]
image = "desktop"
size = 8
capacity = {COUNT + 8}
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with ServedDaemon(tmp_path / "state", CONFIG) as served:
        served.wait_for(r"pool desktop: (ready)")
        yield served.wait_for(r"listening on (\S+)")


async def play(args: Any, sample: Sample) -> None:
    """Run a sample; `current` is its index where the engine replies."""
    current.set(sample.index or 0)
    await generate(args, sample, {"max_new_tokens": 400})


async def test_32_rollouts_of_one_event_loop_complete(address: str) -> None:
    args = stand_in_args(
        {"hosts": [address], "agent": PATIENT}, n_samples_per_prompt=8, sglang_server_concurrency=COUNT
    )
    samples = [Sample(group_index=i // 8, index=i, metadata={"task_id": TASK}) for i in range(COUNT)]
    with stand_in_slime(ScriptedEngine(counting)):
        await asyncio.gather(*(play(args, sample) for sample in samples))
    assert [sample.reward for sample in samples] == [1.0] * COUNT
    origins = [{facts_of(sample)["origin"] for sample in samples[first : first + 8]} for first in range(0, COUNT, 8)]
    assert all(len(group) == 1 for group in origins)


def loses_machine(index: int) -> bool:
    """Whether a sample's machine dies: all of group 0, some of each further group."""
    return index < 8 or index % 3 == 0


def gives_up(index: int) -> bool:
    """Whether a sample ends its task at once and scores 0."""
    return index % 5 == 0


def reply_of(index: int, turn: int) -> str:
    """Return a sample's reply at a turn, from 1."""
    plan = [[Done()]] if gives_up(index) else PLAN
    if loses_machine(index):
        plan = [PLAN[0], PLAN[0]]
    return SAY(plan[turn - 1])


async def test_lost_rollouts_do_not_change_the_advantages_of_others() -> None:
    """Machines die during episodes; nothing is raised, and no lost sample becomes a zero."""
    count = 3 * 8
    samples = [Sample(group_index=i // 8, index=i, metadata={"task_id": TASK}) for i in range(count)]
    engine = ScriptedEngine(lambda prompt: reply_of(current.get(), turn_in(prompt)))
    async with serve_fake(size=8, capacity=count + 8, faults=Faults(die_after_inputs=SOLVING_INPUTS)) as server:
        envd = {"hosts": [server.address], "attempts": 1, "agent": PATIENT, "halt": {"above": {}}}
        args = stand_in_args(envd, n_samples_per_prompt=8, sglang_server_concurrency=count)
        with stand_in_slime(engine):
            await asyncio.gather(*(play(args, sample) for sample in samples))
        raw, normal = normalize_rewards(args, samples)
    lost = [index for index, sample in enumerate(samples) if is_void(sample)]
    assert lost == [index for index in range(count) if loses_machine(index)]
    assert {facts_of(samples[index])["void"] for index in lost} == {"MachineLost"}
    assert {(raw[index], normal[index], sum(samples[index].loss_mask or ())) for index in lost} == {(0.0, 0.0, 0)}
    for first in range(0, count, 8):
        kept = [index for index in range(first, first + 8) if index not in lost]
        rewards = [raw[index] for index in kept]
        assert rewards == [0.0 if gives_up(index) else 1.0 for index in kept]
        if len(set(rewards)) > 1:
            mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
            expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
            assert [normal[index] for index in kept] == pytest.approx(expected)
        else:
            assert {normal[index] for index in kept} <= {0.0}
