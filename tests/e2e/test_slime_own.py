"""slime's rollout plays with own prompt, grammar and reward, and remembers tasks; own code that fails ends the run."""

from typing import Any

import pytest

from cuaenv.client import Click, Done
from tests.support.counting import AGENT, PARAMS, TASK, turn_in
from tests.support.server import serve_fake
from tests.support.slime import Sample, ScriptedEngine, Tokenizer, stand_in_args, stand_in_slime
from trainer.agent.grammars import grammar
from trainer.rewards.facts import EpisodeFacts
from trainer.slime.config import Halted
from trainer.slime.hooks import generate
from trainer.slime.job import job_of
from trainer.slime.play.samples import facts_of

OWN = "docs.examples.own"
LINES = grammar(f"{OWN}.my_grammar:Lines").render
#: Five clicks on the task's button, in 0 to 1000, and the end.
PLAN = [[Click(640, 125)]] * 5 + [[Done()]]


def say(prompt: str) -> str:
    return LINES(PLAN[turn_in(prompt) - 1])


def fails_on_desktops(facts: EpisodeFacts) -> float:
    """Pass the trials at the start, and fail for the first real episode."""
    if not facts.task_id.startswith("trial/"):
        raise LookupError(facts.task_id)
    return facts.task_score


async def rolled_out(**envd: Any) -> tuple[Any, Any, ScriptedEngine]:
    """Return a sample, slime's arguments and the engine."""
    engine = ScriptedEngine(say)
    agent = {**AGENT, "max_turns": 6, "grammar": f"{OWN}.my_grammar:Lines", "prompt": f"{OWN}.my_prompt:Terse"}
    async with serve_fake(size=1, capacity=1) as server:
        with stand_in_slime(engine):
            args = stand_in_args(
                {"hosts": [server.address], "engine_timeout_s": 60.0, "agent": agent, **envd}, n_samples_per_prompt=1
            )
            sample = Sample(group_index=0, index=0, metadata={"task_id": TASK})
            try:
                return await generate(args, sample, dict(PARAMS)), args, engine
            finally:
                assert server.pool.statistics().leased_count == 0


async def test_an_episode_is_played_and_rewarded_by_own_code() -> None:
    reward = {"recipe": f"{OWN}.my_reward:Brisk", "per_turn": 0.05}
    sample, args, engine = await rolled_out(reward=reward, branch=f"{OWN}.my_branch:early", curriculum="solve_rate")
    facts = facts_of(sample)
    assert (facts["task_score"], facts["turns"]) == (1.0, 6)
    assert facts["reward_parts"] == {"task": 1.0, "turns": pytest.approx(-0.3)}
    assert sample.reward == pytest.approx(0.7)
    prompt = Tokenizer().decode(engine.requests[-1]["input_ids"])
    assert "You use a computer. After each reply you see a screenshot. 6 replies." in prompt
    assert "Write `click X Y`" in prompt
    assert "Goal: " in prompt
    assert job_of(args).tasks.state() == {TASK: [True]}


async def test_a_reward_that_fails_ends_the_run_and_makes_no_episode_void() -> None:
    with pytest.raises(Halted, match="fails_on_desktops: it raised LookupError: fake/count-to-five"):
        await rolled_out(reward=f"{__name__}:fails_on_desktops")
