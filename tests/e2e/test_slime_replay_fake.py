"""Replay of a success to a failed group: real episodes over gRPC, doubles of slime."""

import asyncio
import json
from typing import Any

import pytest

from cuaenv.client import Done
from envd.tasks import perturbations
from envd.tasks.model import Task
from tests.support.counting import AGENT, PARAMS, SAY, TASK, counting, turn_in
from tests.support.server import load_fake_tasks, serve_fake
from tests.support.slime import Sample, ScriptedEngine, stand_in_args, stand_in_slime
from trainer.slime import job as registry
from trainer.slime.hooks import generate, keep_informative, normalize_rewards
from trainer.slime.play.samples import facts_of


def give_up(prompt: str) -> str:
    return SAY([Done()])


def group_of(count: int, *, group_index: int, task: str = TASK) -> list[Any]:
    return [
        Sample(group_index=group_index, index=group_index * 100 + member, metadata={"task_id": task})
        for member in range(count)
    ]


async def rolled_out(args: Any, group: list[Any], *, evaluation: bool = False) -> list[Any]:
    return await asyncio.gather(*(generate(args, sample, dict(PARAMS), evaluation=evaluation) for sample in group))


@pytest.mark.parametrize("agent", [{}, {"images_per_row": 2, "images_kept": 1}], ids=["one row", "rows"])
async def test_a_failed_group_gets_an_earlier_success(agent: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_jobs", {})
    says = [counting]

    def say(prompt: str) -> str:
        return says[-1](prompt)

    engine = ScriptedEngine(say)
    async with serve_fake(size=2, capacity=4) as server:
        with stand_in_slime(engine):
            envd = {
                "hosts": [server.address],
                "engine_timeout_s": 20.0,
                "replay": {"seed": 3},
                "agent": {**AGENT, **agent},
            }
            args = stand_in_args(envd, n_samples_per_prompt=2)
            pool = registry.job_of(args).pool
            assert pool is not None
            await rolled_out(args, group_of(1, group_index=8), evaluation=True)
            assert len(pool) == 0, "evaluations are not replayed"
            solved = await rolled_out(args, group_of(2, group_index=0))
            assert len(pool) == 2
            says.append(give_up)
            failed = await rolled_out(args, group_of(2, group_index=1))
            own = failed[0]
            assert keep_informative(args, failed).keep
            flat = [row for member in failed for row in (member if isinstance(member, list) else [member])]
            _, normal = normalize_rewards(args, flat)
    assert len(failed) == 2
    assert failed[0] is own
    before = [rows if isinstance(rows, list) else [rows] for rows in solved]
    shown = failed[1] if isinstance(failed[1], list) else [failed[1]]
    assert [row.tokens for row in shown] in [[row.tokens for row in rows] for rows in before]
    for row, original in zip(shown, next(rows for rows in before if rows[0].tokens == shown[0].tokens), strict=True):
        assert row.rollout_log_probs == original.rollout_log_probs
        assert row.loss_mask == original.loss_mask
        assert row.weight_versions == original.weight_versions
        assert row.multimodal_train_inputs == original.multimodal_train_inputs
        assert facts_of(row)["replay"] == "behaviour_log_probs"
        assert json.dumps(row.metadata)
    assert normal[0] < 0 < normal[-1]


async def test_a_success_without_a_reward_is_neither_kept_nor_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_jobs", {})

    def talk_on(prompt: str) -> str:
        return counting(prompt) if turn_in(prompt) <= 2 else "The task is done."

    says = [talk_on]

    def say(prompt: str) -> str:
        return says[-1](prompt)

    async with serve_fake(size=2, capacity=4) as server:
        with stand_in_slime(ScriptedEngine(say)):
            envd = {
                "hosts": [server.address],
                "engine_timeout_s": 20.0,
                "replay": {"seed": 3},
                "reward": {"recipe": "task", "strict": True},
                "agent": AGENT,
            }
            args = stand_in_args(envd, n_samples_per_prompt=2)
            pool = registry.job_of(args).pool
            assert pool is not None
            unpaid = await rolled_out(args, group_of(2, group_index=0))
            assert [(facts_of(sample)["task_score"], sample.reward) for sample in unpaid] == [(1.0, 0.0)] * 2
            assert len(pool) == 0
            assert registry.job_of(args).tasks.state() == {TASK: [False, False]}
            says.append(counting)
            paid = await rolled_out(args, group_of(2, group_index=1))
            assert [sample.reward for sample in paid] == [1.0, 1.0]
            assert len(pool) == 2
            assert registry.job_of(args).tasks.state() == {TASK: [False, False, True, True]}


async def test_a_success_in_a_perturbed_world_is_not_kept_for_another_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_jobs", {})
    # Drawn desktops have no programs for the true ones.
    verbs = [{"kind": "make_directory", "path": "/home/user/perturbed"}]
    monkeypatch.setitem(perturbations._KINDS, "theme", (lambda _: verbs, True))
    plain = load_fake_tasks().get(TASK).model_dump(exclude_unset=True, exclude={"oracle"})
    task = Task.model_validate({**plain, "task_id": "fake/perturbed", "perturb": {"kinds": ["theme"]}})
    async with serve_fake(size=2, capacity=4, extra_tasks=[task]) as server:
        with stand_in_slime(ScriptedEngine(counting)):
            envd = {"hosts": [server.address], "engine_timeout_s": 20.0, "replay": {"seed": 3}, "agent": AGENT}
            args = stand_in_args(envd, n_samples_per_prompt=2)
            pool = registry.job_of(args).pool
            assert pool is not None
            solved = await rolled_out(args, group_of(2, group_index=0, task=task.task_id))
    facts = [facts_of(sample) for sample in solved]
    assert [(known["task_score"], known["start"]) for known in facts] == [(1.0, "")] * 2
    assert len(pool) == 0
