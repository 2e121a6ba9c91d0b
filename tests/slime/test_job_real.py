"""slime's own `train.py` and `train_async.py`: its arguments, Ray actors and router, with only the learner replaced."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuaenv.client import Click, Done, EnvClient
from tests.support.served import ServedDaemon
from tests.support.sglang import SglangServer
from trainer.agent.grammars import grammar
from trainer.learn.slime_job import write_tasks

pytestmark = [pytest.mark.slime, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
SAY = grammar("qwen3-vl").render
REPLIES = (SAY([Click(640, 125, count=3)]), SAY([Click(640, 125, count=2)]), SAY([Done()]))
TASKS = ["fake/count-to-five", "fake/save-note"] * 3
DAEMON = """\
[hypervisor]
uri = "fake"

[pools.desktop]
image = "desktop"
size = 4
capacity = 6

[limits.runs.narrow]
quota = 2

[limits.runs.wide]
weight = 1.0
"""
AGENT = {
    "max_turns": 4,
    "image_max_pixels": 65_536,
    "reply_tokens": 128,
    "prompt_tokens": 4096,
    "context_tokens": 8192,
    "timeout_s": 240.0,
}


def play(prompt: str) -> str:
    """Solve `fake/count-to-five` in three replies."""
    return REPLIES[min(prompt.count("<|im_start|>assistant\n"), len(REPLIES)) - 1]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ServedDaemon]:
    with ServedDaemon(tmp_path / "state", DAEMON) as served:
        served.wait_for(r"pool desktop: (ready)")
        yield served


@pytest.fixture
def engines(checkpoint: Path) -> Iterator[list[SglangServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(SglangServer(checkpoint, script=play)) for _ in range(2)]


class Job:
    """A process of slime's `train.py`."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        checkpoint: Path,
        hosts: str,
        engines: Sequence[SglangServer],
        envd: Mapping[str, Any] | None = None,
        script: str = "train",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; `directory` has its configuration, checkpoints and log."""
        directory.mkdir(exist_ok=True)
        settings = {"hosts": hosts, "engine_timeout_s": 120.0, "record_dir": str(directory), **(envd or {})}
        config = directory / "envd.yaml"
        config.write_text(yaml.safe_dump({"envd": {**settings, "agent": AGENT}}), encoding="utf-8")
        hooks = {
            "generate-function": "trainer.slime.hooks.generate",
            "rm": "trainer.slime.hooks.reward_func",
            "reward-post-process": "trainer.slime.hooks.normalize_rewards",
            "rollout-log-function": "trainer.slime.hooks.log_rollout",
            "eval-rollout-log-function": "trainer.slime.hooks.log_evaluation",
        }
        values = {
            "prompt-data": str(write_tasks(directory / "tasks.jsonl", TASKS)),
            "input-key": "prompt",
            "metadata-key": "metadata",
            "custom-config-path": str(config),
            "hf-checkpoint": str(checkpoint),
            **{f"custom-{name}-path": path for name, path in hooks.items()},
            "rollout-sample-hook-path": "trainer.slime.hooks.record_sample",
            "rollout-max-context-len": "8192",
            "rollout-max-response-len": "128",
            "n-samples-per-prompt": "2",
            "rollout-batch-size": "2",
            "global-batch-size": "4",
            "num-rollout": "2",
            "sglang-server-concurrency": "2",
            "router-prometheus-host": "127.0.0.1",
            "max-tokens-per-gpu": "8192",
            "rotary-base": "1000000",
            "save": str(directory),
            "load": str(directory),
            "save-interval": "1",
        }
        command = [
            *(sys.executable, "-m", "tests.support.slime_train", os.environ["SLIME_HOME"], script),
            *(part for name, value in values.items() for part in (f"--{name}", value)),
            *("--apply-chat-template", "--use-dynamic-batch-size"),
            *("--rollout-external-engine-addrs", *(f"{engine.host}:{engine.port}" for engine in engines)),
            *flags,
        ]
        self.directory = directory
        self._log = (directory / "log").open("a", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]), **(environ or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        status = self.process.wait(timeout=900)
        self._log.close()
        return status

    def kill(self) -> None:
        """Send SIGKILL to the process and all that are in its group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    @property
    def log(self) -> str:
        """Its output."""
        return (self.directory / "log").read_text(encoding="utf-8", errors="replace")

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The batches that its learner received."""
        path = self.directory / "trained.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def records(self, rollout_id: int) -> list[dict[str, Any]]:
        """The recorded samples of a rollout."""
        path = self.directory / f"rollout-{rollout_id}.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def trained_indices(job: Job) -> dict[int, list[int]]:
    """Return the indices of the samples of each batch."""
    return {
        line["rollout_id"]: sorted(index for rank in line["ranks"] for index in rank["sample_indices"])
        for line in job.trained
    }


def address_of(daemon: ServedDaemon) -> str:
    return daemon.wait_for(r"listening on (\S+)")


def leased_count(daemon: ServedDaemon) -> int:
    with EnvClient(address_of(daemon)) as client:
        (pool,) = client.list_pools()
    return pool.leased_count


def metrics(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 -- loopback
        text: str = answer.read().decode()
    return text


def episodes_started(host: Path) -> float:
    """Return the episodes that the daemon of a host in a Ray cluster has started."""
    (url,) = re.findall(r"metrics on (\S+)", (host / "daemon.out").read_text())
    return sum(map(float, re.findall(r"^envd_episodes_started_total\S* (\S+)$", metrics(url), re.MULTILINE)))


def machines_by_run(daemon: ServedDaemon) -> dict[str, float]:
    text = metrics(daemon.wait_for(r"metrics on (\S+)"))
    found = re.findall(r'^envd_run_machines\{.*run="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {run: float(count) for run, count in found}


def test_two_jobs_share_a_daemon(
    tmp_path: Path, checkpoint: Path, daemon: ServedDaemon, engines: list[SglangServer]
) -> None:
    """A synchronous and a one-step-off job: all batches are complete, and neither takes more than its quota."""
    common: dict[str, Any] = {"checkpoint": checkpoint, "hosts": address_of(daemon), "engines": engines}
    narrow = Job(tmp_path / "narrow", "--router-policy", "round_robin", envd={"run": "narrow"}, **common)
    wide = Job(tmp_path / "wide", envd={"run": "wide"}, script="train_async", **common)
    most: dict[str, float] = {}
    are_done = threading.Event()

    def watch() -> None:
        while not are_done.wait(0.05):
            for run, count in machines_by_run(daemon).items():
                most[run] = max(most.get(run, 0), count)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        statuses = [job.wait() for job in (narrow, wide)]
    finally:
        are_done.set()
        watcher.join()
    assert statuses == [0, 0], narrow.log[-4000:] + wide.log[-4000:]
    for job in (narrow, wide):
        assert trained_indices(job) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
        assert all(count > 0 for line in job.trained for rank in line["ranks"] for count in rank["trained"])
        assert [sample["status"] for number in (0, 1) for sample in job.records(number)] == ["completed"] * 8
    assert most["narrow"] == 2
    assert most["wide"] >= 2
    assert leased_count(daemon) == 0
    assert all(engine.requests for engine in engines), "the router uses all engines"
    # The learner updates the weights before each rollout.
    assert {engine.weight_version for engine in engines} == {"3"}


def test_a_killed_trainer_is_resumed(
    tmp_path: Path, checkpoint: Path, daemon: ServedDaemon, engines: list[SglangServer]
) -> None:
    """Killed within its second rollout, a job repeats that rollout with the same prompts; each is trained once."""
    common: dict[str, Any] = {
        "checkpoint": checkpoint,
        "hosts": address_of(daemon),
        "engines": engines,
        "envd": {"lease_s": 10.0},
    }
    reached, is_released = threading.Event(), threading.Event()
    first = Job(tmp_path / "job", **common)

    def play_or_wait(prompt: str) -> str:
        if first.trained and not is_released.is_set():
            reached.set()
            is_released.wait(600)
        return play(prompt)

    for engine in engines:
        engine.script = play_or_wait
    while not reached.wait(1):
        assert first.process.poll() is None, first.log[-4000:]
    assert leased_count(daemon) > 0
    first.kill()
    is_released.set()
    assert trained_indices(first) == {0: [0, 1, 2, 3]}

    second = Job(tmp_path / "job", "--num-rollout", "3", **common)
    assert second.wait() == 0, second.log[-4000:]
    assert trained_indices(second) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}
    assert [line["rollout_id"] for line in second.trained] == [0, 1, 2], "no batch is trained twice"
    for number in range(3):
        tasks = {sample["index"]: sample["facts"]["task_id"] for sample in second.records(number)}
        first_row = 2 * number
        assert [tasks[index] for index in sorted(tasks)] == [TASKS[first_row]] * 2 + [TASKS[first_row + 1]] * 2
    while leased_count(daemon):
        time.sleep(0.5)  # The leases of the killed job end.


def test_partial_rollouts_of_trees_are_refused(
    tmp_path: Path, checkpoint: Path, daemon: ServedDaemon, engines: list[SglangServer]
) -> None:
    job = Job(
        *(tmp_path / "job", "--partial-rollout"),
        checkpoint=checkpoint,
        hosts=address_of(daemon),
        engines=engines,
        envd={"run": "a", "group": "tree", "branch_every": 1},
    )
    assert job.wait() != 0
    assert "--partial-rollout: members of a tree cannot be continued" in job.log
    assert not job.trained
    assert leased_count(daemon) == 0


def test_a_job_in_a_ray_cluster_opens_its_groups_on_the_three_hosts_of_the_cluster(
    tmp_path: Path, checkpoint: Path, engines: list[SglangServer]
) -> None:
    from tests.support.ray_hosts import RayHosts

    (tmp_path / "ray").mkdir()
    served = RayHosts(tmp_path / "ray", capacity=8)
    try:
        for index in range(3):
            served.add(f"host-{index}")
        served.up()
        # Two groups of 6 do not fit on one host, and slime opens three at once.
        sizes = ("--n-samples-per-prompt", "6", "--rollout-batch-size", "3", "--global-batch-size", "18")
        job = Job(
            *(tmp_path / "job", *sizes, "--sglang-server-concurrency", "18"),
            checkpoint=checkpoint,
            hosts="ray://auto",
            engines=engines,
            environ={"RAY_ADDRESS": served.cluster.address},
        )
        assert job.wait() == 0, job.log[-4000:]
        assert trained_indices(job) == {0: list(range(18)), 1: list(range(18, 36))}
        assert [sample["status"] for number in (0, 1) for sample in job.records(number)] == ["completed"] * 36
        served.wait(lambda: not served.leased())
        assert all(episodes_started(tmp_path / "ray" / f"host-host-{index}") >= 6 for index in range(3))
    finally:
        served.close()
