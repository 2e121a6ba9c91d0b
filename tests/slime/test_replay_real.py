"""Replay in slime's own rollout: what one rollout solved, a later one that fails is shown, and it trains on it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Click, Done
from tests.support.sglang import SglangServer
from tests.support.slime_job import SlimeJob, check_sample, counting_job
from trainer.agent.grammars import grammar
from trainer.slime import job as registry
from trainer.slime.play.samples import facts_of, flatten

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]

SAY = grammar("qwen3-vl").render
AGENT = {"max_turns": 4, "image_max_pixels": 65_536, "reply_tokens": 96, "prompt_tokens": 4096, "context_tokens": 8192}


@pytest.fixture
def plan() -> dict[int, str]:
    """What the model is made to say, by the number of the reply; whatever it likes where nothing is planned."""
    return {1: SAY([Click(640, 125, count=3), Click(640, 125, count=2)]), 2: SAY([Done()])}


@pytest.fixture
def job_of(
    checkpoint: Path, fake_daemon: str, tmp_path: Path, plan: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setattr(registry, "_jobs", {})
    with ExitStack() as open_things:
        engine = open_things.enter_context(
            SglangServer(checkpoint, script=lambda prompt: plan.get(prompt.count("<|im_start|>assistant\n")))
        )

        def make(**changed: Any) -> SlimeJob:
            envd = {"hosts": [fake_daemon], "replay": {"seed": 1}, "engine_timeout_s": 60.0, "agent": AGENT}
            served = (engine.host, engine.port)
            return counting_job(envd, checkpoint, tmp_path, engine=served, **{"n_samples_per_prompt": 2, **changed})

        yield make


def test_a_failed_rollout_trains_on_an_earlier_success(job_of: Any, plan: dict[int, str]) -> None:
    with job_of() as job:
        solved = flatten(job.rollout().samples)
        assert [sample.reward for sample in solved] == [1.0, 1.0]
        pool = registry.job_of(job.args).pool
        assert pool is not None
        assert len(pool) == 2

    plan.clear()
    plan[1] = SAY([Done()])
    with job_of(dynamic_sampling_filter_path="trainer.slime.hooks.keep_informative") as job:
        groups = job.rollout(1).samples
        data = job.train_data(groups)
        for sample in flatten(groups):
            check_sample(sample, image_id=job.image_id)
    own, shown = flatten(groups)
    assert facts_of(own)["task_score"] == 0.0
    assert facts_of(shown)["replay"] == "behaviour_log_probs"
    assert data["raw_reward"] == [0.0, 1.0]
    assert data["rewards"][1] > 0 > data["rewards"][0]
    original: Any = next(sample for sample in solved if sample.tokens == shown.tokens)
    assert data["rollout_log_probs"][1] == original.rollout_log_probs
    for name, tensor in original.multimodal_train_inputs.items():
        assert data["multimodal_train_inputs"][1][name].equal(tensor)


def test_the_fully_asynchronous_loop_replays_without_a_filter(job_of: Any, plan: dict[int, str]) -> None:
    with job_of() as job:
        solved = flatten(job.rollout().samples)
    plan.clear()
    plan[1] = SAY([Done()])
    with job_of(sglang_server_concurrency=2) as job:
        try:
            groups = job.fully_async_rollout(1)
        finally:
            job.stop_fully_async()
        data = job.train_data(groups)
        for sample in flatten(groups):
            check_sample(sample, image_id=job.image_id)
    assert data["raw_reward"] == [0.0, 1.0]
    assert data["rewards"][1] > 0 > data["rewards"][0]
    shown = next(sample for sample in solved if sample.tokens == data["tokens"][1])
    assert data["rollout_log_probs"][1] == shown.rollout_log_probs
