"""Groups that start after given replies: in one state, of which only the policy's own turns are trained."""

from typing import Any

import pytest

from cuaenv.client import Click, Done
from tests.support.branching import world
from tests.support.counting import PLAN, SAY, TASK, counting, turn_in
from trainer.agent.training import TrainingConfig
from trainer.config import ConfigError
from trainer.slime.job import job_of
from trainer.slime.play.samples import by_rollout, facts_of, flatten, is_void

FAR_CLICK = SAY([Click(500, 500)]).replace("500, 500", "5000, 500")
REPLIES = [SAY(actions) for actions in PLAN]


@pytest.mark.parametrize("agent", [{}, {"images_per_row": 1, "images_kept": 1}])
async def test_a_group_starts_in_one_state_and_trains_its_own_turns_alone(agent: dict[str, Any]) -> None:
    async with world() as there:
        members = await there.rolled_out(3, REPLIES[:1], agent=agent)
        given = sorted(map(turn_in, there.prompts))
        first_pictures = {
            picture for prompt, picture in zip(there.prompts, there.pictures, strict=True) if turn_in(prompt) == 2
        }
        whole = await there.rolled_out(1, [], agent=agent)
    # The first member performs the reply, and two forks of it continue there.
    assert there.forks == [2]
    assert given == [2, 2, 2, 3, 3, 3], "no given turn is sampled"
    assert first_pictures == {there.pictures[-2]}, "the state that the reply of a whole episode leads to"
    samples = flatten(members)
    assert not any(map(is_void, samples))
    assert {sample.reward for sample in samples} == {1.0}
    assert {(facts_of(each)["turns"], facts_of(each)["shared_turns"]) for each in samples} == {(3, 1)}
    assert {facts_of(sample)["start"] for sample in samples} == {""}, "never replayed"
    assert len({facts_of(sample)["origin"] for sample in samples}) == 1
    for rows in by_rollout(samples):
        assert sum(sum(row.loss_mask or ()) for row in rows) == facts_of(rows[0])["reply_tokens"]
    # The policy reads what it would have read after a reply of its own.
    of_whole = there.prompts[-3:]
    assert set(there.prompts[:-3]) == set(of_whole[1:])
    assert [each for each in flatten(whole) if is_void(each)] == []


@pytest.mark.parametrize(("count", "evaluation", "group"), [(1, False, "fork"), (2, True, "fork"), (2, False, "off")])
async def test_members_without_a_group_perform_the_replies_themselves(count: int, evaluation: bool, group: str) -> None:
    async with world() as there:
        members = await there.rolled_out(count, REPLIES[:2], evaluation=evaluation, group=group)
    assert there.forks == []
    assert [sample.reward for sample in members] == [1.0] * count
    assert list(map(turn_in, there.prompts)) == [3] * count


async def test_a_tree_branches_after_the_given_replies() -> None:
    async with world() as there:
        members = await there.rolled_out(2, REPLIES[:1], group="tree", branch_every=1)
    assert sorted(facts_of(sample)["shared_turns"] for sample in members) == [1, 2]
    assert [sample.reward for sample in members] == [1.0] * 2


async def test_a_lost_machine_is_replaced_by_one_that_performs_the_replies_again() -> None:
    killed: list[str] = []

    def say(prompt: str) -> str:
        if not killed:
            [machine, *_] = [one for one in there.server.hypervisor.machines.values() if one.input_count]
            killed.append(machine.machine_id)
            machine.kill("killed by a signal")
        return counting(prompt)

    async with world(say) as there:
        members = await there.rolled_out(3, REPLIES[:1])
    assert [sample.reward for sample in members] == [1.0] * 3
    assert sorted(facts_of(sample)["attempts"] for sample in members) == [1, 1, 2]
    assert {facts_of(sample)["shared_turns"] for sample in members} == {1}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [(SAY([Done()]), "the episode ended: done"), ("Nothing to do.", "no <tool_call>"), (FAR_CLICK, "outside")],
)
async def test_replies_that_do_not_lead_to_a_state_make_the_group_void(reply: str, problem: str) -> None:
    async with world() as there:
        members = await there.rolled_out(2, [reply])
    assert all(map(is_void, members))
    assert {facts_of(sample)["void"] for sample in members} == {"GivenReplies"}
    assert all(problem in facts_of(sample)["error"] for sample in members), facts_of(members[0])
    assert there.engine.requests == []


async def test_a_row_with_malformed_replies_cannot_be_played() -> None:
    async with world() as there:
        members = await there.rolled_out(2, "not a list")
    assert {facts_of(sample)["void"] for sample in members} == {"UnplayableRow"}
    assert "column given_replies is not a list of texts" in facts_of(members[0])["error"]


def test_other_trainers_refuse_given_replies() -> None:
    config = TrainingConfig(hosts=("h:1",))
    with pytest.raises(ConfigError, match="column given_replies is for slime's rollouts alone"):
        config.start_of_row({"task_id": TASK}, {"given_replies": REPLIES[:1]})


async def test_a_start_after_given_replies_is_a_task_of_its_own_for_the_curriculum() -> None:
    async with world() as there:
        await there.rolled_out(2, REPLIES[:1])
        tasks = job_of(there.args).tasks
    assert tasks.state() == {f"{TASK}+1": [True, True]}
