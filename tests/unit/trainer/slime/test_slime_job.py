"""The job of a configuration: checks that are made once, and the names that flags of earlier releases have."""

import asyncio
import importlib
import logging
import re
from argparse import Namespace
from typing import Any

import pytest

from cuaenv.client import AsyncEnvClient, AsyncEpisode
from tests.support.clock import until
from trainer import slime
from trainer.agent import attempts, loop
from trainer.agent.branching import TreeMember
from trainer.agent.groups import GroupMember, Groups, Tree
from trainer.config import InputError
from trainer.slime import hooks
from trainer.slime.job import Job, job_of
from trainer.slime.monitor import RunMonitor
from trainer.slime.play import samples
from trainer.slime.play.engine import SlimeEngine
from trainer.slime.play.rollout import Rollout
from trainer.slime.play.workers import Workers
from trainer.tokens.conversation import TokenConversation

HOSTS = {"hosts": ["h:1"]}


class Check:
    """A check that ends as the test says."""

    def __init__(self, *ends: bool | Exception) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self._ends = list(ends)

    async def __call__(self) -> bool:
        self.count += 1
        await self.may_end.wait()
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


@pytest.fixture
def job() -> Job:
    return Job(job_of(Namespace(envd=HOSTS)).config)


async def test_samples_wait_for_the_one_that_makes_a_check_and_later_ones_do_not_repeat_it(job: Job) -> None:
    check = Check(True)
    samples = [asyncio.create_task(job._once("engine", check)) for _ in range(3)]
    await until(lambda: check.count > 0)
    assert not any(sample.done() for sample in samples)
    check.may_end.set()
    await asyncio.gather(*samples)
    await job._once("engine", check)
    assert check.count == 1


async def test_a_check_that_could_not_be_made_is_made_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    check = Check(False, OSError("no space left"), InputError("bad"), True)
    check.may_end.set()
    await job._once("engine", check)
    with caplog.at_level(logging.ERROR):
        await job._once("engine", check)
    assert "no space left" in caplog.text, "the first episode reports it, too"
    with pytest.raises(InputError):
        await job._once("engine", check)
    for _ in range(2):
        await job._once("engine", check)
    assert check.count == 4


async def test_a_cancelled_sample_ends_no_check_of_others(job: Job) -> None:
    check = Check(True)
    first, waiting, other = (asyncio.create_task(job._once("engine", check)) for _ in range(3))
    await until(lambda: check.count > 0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    check.may_end.set()
    await asyncio.gather(first, other)
    assert check.count == 1


async def test_a_cancelled_check_is_made_by_the_next_sample(job: Job) -> None:
    check = Check(True)
    first = asyncio.create_task(job._once("engine", check))
    await until(lambda: check.count > 0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    check.may_end.set()
    await job._once("engine", check)
    assert check.count == 2


def test_equal_configurations_share_one_job_of_the_process() -> None:
    job = job_of(Namespace(envd={**HOSTS}))
    assert job_of(Namespace(envd={**HOSTS}, load="x")) is job
    assert job_of(Namespace(envd={**HOSTS, "attempts": 3})) is not job


@pytest.mark.parametrize(
    "name",
    [
        "credit.advantages",
        "filters.keep_informative",
        "generate.generate",
        "group.normalize_rewards",
        "metrics.log_evaluation",
        "metrics.log_rollout",
        "replay.data_source",
        "rewards.reward_func",
        "sft.generate_rollout",
        "samples.is_void",
    ],
)
def test_a_name_of_0_2_0_is_refused_and_the_new_one_exists(name: str) -> None:
    module, _, function = name.rpartition(".")
    with pytest.raises(ModuleNotFoundError, match=rf"trainer\.slime\.{module}: .* write trainer\.slime\.hooks\.NAME"):
        importlib.import_module(f"trainer.slime.{module}")
    assert callable(getattr(importlib.import_module("trainer.slime.hooks"), function))


async def test_samples_of_one_event_loop_share_groups_and_those_of_another_loop_do_not(job: Job) -> None:
    groups = job.here().groups
    assert job.here().groups is groups

    async def elsewhere() -> None:
        assert job.here().groups is not groups

    await asyncio.to_thread(lambda: asyncio.run(elsewhere()))


def test_the_walk_of_a_sample_names_functions_that_exist() -> None:
    walk = (slime.__doc__ or "").rpartition("```text\n")[2].partition("```")[0]
    classes: list[Any] = [Job, Workers, Rollout, GroupMember, TreeMember, Groups, Tree, AsyncEnvClient, AsyncEpisode]
    known = {each.__name__: each for each in [*classes, loop._PlayedEpisode, TokenConversation, SlimeEngine]}
    known |= {"attempts": attempts, "loop": loop, "hooks": hooks, "samples": samples, "monitor": RunMonitor}
    named = re.findall(r"\b(\w+)\.(\w+)", walk)
    assert {owner for owner, _ in named} == set(known)
    assert [f"{owner}.{name}" for owner, name in named if not hasattr(known[owner], name)] == []
