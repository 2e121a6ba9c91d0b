"""`envd.workers` with slime's rollout code: samples of worker processes, one that is killed, aborts, and memory."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Click, Done, EnvClient
from tests.slime.test_rollout_real import AGENT, SAY
from tests.support.clock import until
from tests.support.sglang import SglangServer
from tests.support.slime_job import SlimeJob, check_train_data, counting_job, log_prob_gaps
from trainer.slime import job as registry
from trainer.slime.play.samples import facts_of, flatten, is_void
from trainer.slime.play.workers import Workers

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

COUNT = 2


def counting(prompt: str) -> str:
    """Solve the task in two replies."""
    if prompt.count("<|im_start|>assistant\n") == 1:
        return SAY([Click(640, 125, count=3), Click(640, 125, count=2)])
    return SAY([Done()])


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[SglangServer]:
    with SglangServer(checkpoint, script=counting) as server:
        yield server


@pytest.fixture
def job_of(checkpoint: Path, engine: SglangServer, fake_daemon: str, tmp_path: Path) -> Iterator[Any]:
    stack, jobs = ExitStack(), list[SlimeJob]()
    # The test's process has slime on its path; a worker starts with the same one.
    envd = {"hosts": [fake_daemon], "engine_timeout_s": 600.0, "workers": COUNT, "lease_s": 10.0, "agent": AGENT}

    def make(**changed: Any) -> SlimeJob:
        job = counting_job(envd, checkpoint, tmp_path, engine=(engine.host, engine.port), **changed)
        stack.enter_context(job)
        jobs.append(job)
        return job

    with stack:
        yield make
        for pid in [pid for job in jobs for pid in registry.job_of(job.args).workers(job.args).pids()]:
            os.kill(pid, signal.SIGKILL)


def pictures_in(pid: int) -> int:
    """Return the blocks of memory for tensors that a worker has."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return sum("memfd:pictures" in link for link in links)


def test_samples_of_workers_are_those_of_one_process(job_of: Any, model: SglangServer, fake_daemon: str) -> None:
    job = job_of(n_samples_per_prompt=2, rollout_batch_size=2, over_sampling_batch_size=2)
    blocks = []
    for number in range(3):
        samples: list[Any] = flatten(job.rollout(number).samples)
        check_train_data(job, [samples[:2], samples[2:]])
        assert [(sample.status.name, facts_of(sample)["task_score"]) for sample in samples] == [("COMPLETED", 1.0)] * 4
        for group in (samples[:2], samples[2:]):
            assert len({facts_of(sample)["origin"] for sample in group}) == 1
        for sample in samples:
            names = [event["name"] for event in sample.trace["events"] if event["type"] == "span_start"]
            assert names.count("env_evaluate") == 1
            assert max(log_prob_gaps(sample, model)) < 0.02, "tokens and pixels are those that were sampled with"
        pids = registry.job_of(job.args).workers(job.args).pids()
        blocks.append([pictures_in(pid) for pid in pids])
        del samples, group, sample
    assert len(pids) == COUNT
    # Samples that are built at one time need a block each, and how many are depends on the host's speed.
    assert all(0 < last < 3 * first for first, last in zip(blocks[0], blocks[2], strict=True)), (
        "memory of tensors that slime dropped is used again"
    )
    with EnvClient(fake_daemon) as client:
        (pool,) = client.list_pools()
    assert pool.leased_count == 0


def killing(workers: Callable[[], Workers], *, times: int) -> Callable[[str], str | None]:
    """Return a script that kills the first worker at its first replies."""
    left = times

    def say(prompt: str) -> str | None:
        nonlocal left
        if left and (pids := workers().pids()):
            left -= 1
            os.kill(pids[0], signal.SIGKILL)
        return counting(prompt)

    return say


def test_samples_of_a_killed_worker_start_over(
    job_of: Any, engine: SglangServer, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(n_samples_per_prompt=2, rollout_batch_size=2, over_sampling_batch_size=2)
    engine.script = killing(lambda: registry.job_of(job.args).workers(job.args), times=1)
    samples: list[Any] = flatten(job.rollout().samples)
    assert [facts_of(sample).get("task_score") for sample in samples] == [1.0] * 4
    assert "ended with status -9; it starts over" in caplog.text


def test_a_sample_whose_workers_are_always_killed_is_void(job_of: Any, engine: SglangServer) -> None:
    job = job_of(n_samples_per_prompt=1, rollout_batch_size=1, over_sampling_batch_size=1, global_batch_size=1)
    engine.script = killing(lambda: registry.job_of(job.args).workers(job.args), times=9)
    (sample,) = flatten(job.rollout().samples)
    assert is_void(sample)
    assert (facts_of(sample)["void"], facts_of(sample)["owner"]) == ("WorkerLost", "trainer")


def test_slimes_abort_reaches_the_workers(job_of: Any, fake_daemon: str) -> None:
    job = job_of(n_samples_per_prompt=2, rollout_batch_size=1, over_sampling_batch_size=3)
    for number in range(2):
        samples: list[Any] = flatten(job.rollout(number).samples)
        assert [facts_of(sample)["task_score"] for sample in samples] == [1.0] * 2
    with EnvClient(fake_daemon) as client:
        # The daemon may still be ending the last episode.
        asyncio.run(until(lambda: client.list_pools()[0].leased_count == 0))
