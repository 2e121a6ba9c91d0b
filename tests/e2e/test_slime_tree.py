"""A group as a tree over gRPC: members branch from each other, and each reply is trained once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import pytest

from cuaenv.client import Done
from envd.episodes.types import ForkCommand, OpenedGroup
from tests.support.counting import AGENT, PARAMS, SAY, TASK, counting, turn_in
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Sample, ScriptedEngine, Tokenizer, rollout_metrics, stand_in_args, stand_in_slime
from trainer.slime.hooks import generate, normalize_rewards
from trainer.slime.play.samples import by_rollout, facts_of, flatten, is_void


class World:
    def __init__(self, server: FakeServer, engine: ScriptedEngine) -> None:
        self.server, self.engine = server, engine
        self.forks: list[int] = []
        perform = server.service.fork

        async def fork(command: ForkCommand) -> OpenedGroup:
            result = await perform(command)
            self.forks.append(command.fork_count)
            return result

        server.service.fork = fork

    async def rolled_out(self, count: int, *, agent: dict[str, Any] | None = None, **envd: Any) -> list[Any]:
        mapping = {"hosts": [self.server.address], "group": "tree", "branch_every": 1, "engine_timeout_s": 60.0, **envd}
        self.args = stand_in_args({**mapping, "agent": {**AGENT, **(agent or {})}}, n_samples_per_prompt=count)
        group = [Sample(group_index=0, index=index, metadata={"task_id": TASK}) for index in range(count)]
        return await asyncio.gather(*(generate(self.args, sample, dict(PARAMS)) for sample in group))

    async def all_returned(self) -> None:
        async with asyncio.timeout(60):
            while self.server.pool.statistics().leased_count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world(say: Any = counting, **options: Any) -> AsyncIterator[World]:
    engine = ScriptedEngine(say)
    async with serve_fake(**{"size": 2, "capacity": 8, **options}) as server:
        with stand_in_slime(engine):
            yield World(server, engine)


def trained_replies(sample: Any) -> int:
    """Return the number of replies that are trained: an observation follows each of them in the mask."""
    return sum(is_trained for is_trained, _ in groupby(sample.loss_mask))


async def test_members_branch_at_every_point_and_each_reply_is_trained_once() -> None:
    async with world() as there:
        samples = await there.rolled_out(4)
        await there.all_returned()
    assert there.forks == [1, 1, 1]
    assert [sample.reward for sample in samples] == [1.0] * 4
    shared = sorted(facts_of(sample)["shared_turns"] for sample in samples)
    assert shared == [0, 1, 2, 2]
    # One request before the first branch, two before the second ones, four after them.
    prompts = [Tokenizer().decode(request["input_ids"]) for request in there.engine.requests]
    assert Counter(map(turn_in, prompts)) == {1: 1, 2: 2, 3: 4}
    # By hand: A has turns 1 to 3; B branches after A's first and has 2 and 3; C and D branch after the second turns of
    # A and B and have 3. The engine sampled 3 + 2 + 1 + 1 replies, and each is trained in the row of its own member.
    assert sorted(trained_replies(sample) for sample in samples) == [1, 1, 2, 3]
    assert sum(map(trained_replies, samples)) == len(there.engine.requests)
    # Every sample has the complete history; shared turns are in its prompt.
    assert len({tuple(sample.tokens) for sample in samples}) == 1
    for sample in samples:
        facts = facts_of(sample)
        assert sum(sample.loss_mask) == facts["reply_tokens"]
        assert (facts["turns"], len(sample.weight_versions)) == (3, 3 - facts["shared_turns"])
        grids = sample.multimodal_train_inputs["image_grid_thw"]
        assert len(grids) == 3
    assert len({facts_of(sample)["origin"] for sample in samples}) == 1, "all started in the first member's state"
    metrics = rollout_metrics(there.args, samples)
    assert (metrics["branched_frac"], metrics["turns"], metrics["parsed_frac"]) == (0.75, 3.0, 1.0)


async def test_branches_are_compared_within_their_group() -> None:
    asked: Counter[int] = Counter()

    def say(prompt: str) -> str:
        asked[turn_in(prompt)] += 1
        gives_up = turn_in(prompt) == 2 and asked[2] == 2
        return SAY([Done()]) if gives_up else counting(prompt)

    async with world(say) as there:
        samples = await there.rolled_out(3, branch_ways=2)
        await there.all_returned()
    raw, normal = normalize_rewards(there.args, samples)
    assert sorted(raw) == [0.0, 1.0, 1.0]
    assert abs(sum(normal)) < 1e-6


async def test_a_full_pool_makes_a_group_without_branches() -> None:
    async with world(size=1, capacity=1) as there:
        samples = await there.rolled_out(3, group_wait_s=0.3)
        await there.all_returned()
    assert [sample.reward for sample in samples] == [1.0] * 3
    assert {facts_of(sample)["shared_turns"] for sample in samples} == {0}


async def test_members_start_from_the_beginning_if_no_branch_point_is_reached() -> None:
    async with world(lambda prompt: SAY([Done()])) as there:
        samples = await there.rolled_out(3, branch_every=2)
    assert there.forks == []
    assert [(sample.reward, facts_of(sample)["shared_turns"]) for sample in samples] == [(0.0, 0)] * 3


async def test_a_lost_branch_is_repeated_alone() -> None:
    killed: list[str] = []

    def say(prompt: str) -> str:
        if turn_in(prompt) == 3 and not killed:
            copies = [one for one in there.server.hypervisor.machines.values() if one.input_count]
            killed.append(copies[-1].machine_id)
            copies[-1].kill("killed by a signal")
        return counting(prompt)

    async with world(say) as there:
        samples = await there.rolled_out(4)
        await there.all_returned()
    assert [sample.reward for sample in samples] == [1.0] * 4
    again = [facts_of(sample) for sample in samples if facts_of(sample)["attempts"] == 2]
    assert [facts["shared_turns"] for facts in again] == [0]


async def test_an_abort_releases_every_machine_and_ends_every_wait() -> None:
    def say(prompt: str) -> str:
        if turn_in(prompt) == 2:
            state.aborted = True
        return counting(prompt)

    engine = ScriptedEngine(say)
    async with serve_fake(size=2, capacity=8) as server:
        with stand_in_slime(engine) as state:
            there = World(server, engine)
            samples = await there.rolled_out(4)
            await there.all_returned()
    assert {sample.status.name for sample in samples} == {"ABORTED"}
    assert all(map(is_void, samples))


async def test_rows_of_a_branch_start_at_its_branch_point() -> None:
    async with world() as there:
        members = await there.rolled_out(3, agent={"images_per_row": 2, "images_kept": 1}, branch_ways=3)
        await there.all_returned()
    rows = by_rollout(flatten(members))
    assert [len(one) for one in rows] == [2, 2, 2]
    assert not any(map(is_void, flatten(members)))
    assert sum(sum(row.loss_mask or ()) for row in flatten(members)) == sum(
        facts_of(one[0])["reply_tokens"] for one in rows
    )
    assert sorted(facts_of(one[0])["shared_turns"] for one in rows) == [0, 1, 1]
    assert sum(map(trained_replies, flatten(members))) == len(there.engine.requests)


@pytest.mark.parametrize("evaluation", [True, False])
async def test_a_sample_without_a_group_runs_alone(evaluation: bool) -> None:
    async with world() as there:
        mapping = {"hosts": [there.server.address], "group": "tree", "branch_every": 1, "engine_timeout_s": 20.0}
        args = stand_in_args({**mapping, "agent": AGENT}, n_samples_per_prompt=4)
        group_index = 0 if evaluation else None
        sample = await generate(
            args, Sample(group_index=group_index, index=0, metadata={"task_id": TASK}), dict(PARAMS), evaluation
        )
    assert (sample.reward, there.forks) == (1.0, [])


async def test_members_name_the_episode_that_they_branched_from() -> None:
    async with world() as there:
        samples = await there.rolled_out(4)
        await there.all_returned()
    found = {facts_of(sample)["episode_id"]: facts_of(sample) for sample in samples}
    branched = [facts for facts in found.values() if facts["shared_turns"]]
    assert len(branched) == 3
    assert all(found[facts["parent_episode_id"]]["turns"] > facts["shared_turns"] for facts in branched)
    assert [facts["first_turn"] for facts in found.values()] == [facts["shared_turns"] + 1 for facts in found.values()]
    assert rollout_metrics(there.args, samples)["tree/branch_points"] == 3


async def test_a_member_branches_before_a_reply_of_which_the_policy_was_unsure() -> None:
    async with world() as there:
        there.engine.log_prob = lambda prompt: -3.0 if turn_in(prompt) == 3 else -0.1
        samples = await there.rolled_out(3, branch_every=3, branch_above=1.0, branch_ways=3)
        await there.all_returned()
    assert there.forks == [2]
    assert sorted(facts_of(sample)["shared_turns"] for sample in samples) == [0, 2, 2]
    assert [sample.reward for sample in samples] == [1.0] * 3
    # The reply of which it was unsure is trained in its member, and sampled again by the others.
    assert sum(map(trained_replies, samples)) == len(there.engine.requests) == 5


async def test_a_tree_has_as_many_roots_as_wanted() -> None:
    async with world() as there:
        samples = await there.rolled_out(4, branch_roots=2)
        await there.all_returned()
    assert sorted(facts_of(sample)["shared_turns"] for sample in samples) == [0, 0, 1, 1]
    assert len({facts_of(sample)["origin"] for sample in samples}) == 1
