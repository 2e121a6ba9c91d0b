"""Rollouts that cannot fill a batch end with an error: unknown tasks, and daemons that are gone."""

import asyncio
from typing import Any

import pytest

from tests.support.server import serve_fake
from tests.support.slime import Sample, ScriptedEngine, stand_in_args, stand_in_slime
from trainer.slime.config import Halted
from trainer.slime.hooks import generate, keep_informative
from trainer.slime.play.samples import facts_of

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


async def rollout(args: Any, task: str, *, batch_size: int = 2) -> None:
    """slime's synchronous loop: start groups until a batch of them is kept."""
    kept_count, group_index = 0, 0
    while kept_count < batch_size:
        group = [
            Sample(group_index=group_index, index=group_index * 10 + n, metadata={"task_id": task}) for n in (0, 1)
        ]
        await asyncio.gather(*(generate(args, sample, {"max_new_tokens": 64}) for sample in group))
        kept_count += keep_informative(args, group).keep
        group_index += 1


async def test_a_rollout_of_unknown_tasks_ends_after_a_bounded_number_of_resets() -> None:
    async with serve_fake(size=1) as server:
        resets = 0
        perform = server.service.reset

        async def reset(command: Any) -> Any:
            nonlocal resets
            resets += 1
            return await perform(command)

        server.service.reset = reset
        args = stand_in_args(
            {"hosts": [server.address], "max_lost_groups": 6, "halt": {"above": {}}}, n_samples_per_prompt=2
        )
        with (
            stand_in_slime(ScriptedEngine(str)),
            pytest.raises(Halted, match=r"6 consecutive groups were lost \(TaskNotFound 12\); last error: .*fake/none"),
        ):
            await rollout(args, "fake/none")
    assert 6 <= resets <= 12, "a member that arrives after its group failed opens it again"


async def test_a_rollout_without_a_daemon_ends_after_its_timeout() -> None:
    async with serve_fake(size=1) as server:
        address = server.address
    args = stand_in_args({"hosts": [address], "daemon_timeout_s": 0.6}, n_samples_per_prompt=2)
    with (
        stand_in_slime(ScriptedEngine(str)),
        pytest.raises(Halted, match=r"no daemon answered for 0\.6 s \(envd\.daemon_timeout_s\)"),
    ):
        await rollout(args, "fake/enable")


async def test_in_the_fully_asynchronous_loop_a_halted_run_returns_void_samples() -> None:
    async with serve_fake(size=1) as server:
        envd = {"hosts": [server.address], "max_lost_groups": 1}
        args = stand_in_args(envd, n_samples_per_prompt=1, rollout_function_path=FULLY_ASYNC)
        with stand_in_slime(ScriptedEngine(str)):
            samples = [
                await generate(
                    args, Sample(group_index=n, index=n, metadata={"task_id": "fake/none"}), {"max_new_tokens": 8}
                )
                for n in range(3)
            ]
    assert [sample.status.name for sample in samples] == ["FAILED"] * 3
    assert [facts_of(sample)["void"] for sample in samples] == ["TaskNotFound", "halted", "halted"]
