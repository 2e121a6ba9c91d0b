"""AReaL's own engine and executor: `RemoteSGLangEngine` and `WorkflowExecutor` with a real model behind `/generate`.

Run by `make areal-proof`. Desktops are drawn; the model is tiny, and a script chooses its replies.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Action, Click, Done
from tests.support.faulty import Faults
from tests.support.server import FakeServer, serve_fake
from tests.support.sglang import SglangServer
from trainer.agent.grammars import grammar
from trainer.learn.checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.areal,
    pytest.mark.timeout(300),
    # AReaL's own dependencies warn of each other.
    pytest.mark.filterwarnings("ignore"),
]

SAY = grammar("qwen3-vl").render
PLAN: list[list[Action]] = [[Click(640, 125, count=3)], [Click(640, 125, count=2)], [Done()]]
AGENT = {"max_turns": 4, "prompt_tokens": 4096, "reply_tokens": 96, "context_tokens": 8192, "image_max_pixels": 65_536}
COUNT = {"task_id": "fake/count-to-five"}
UNKNOWN = {"task_id": "fake/no-such-task"}


def counting(prompt: str) -> str:
    """Solve the task; after an interruption, continue the reply."""
    said = prompt.split("<|im_start|>assistant\n")[1:]
    return SAY(PLAN[len(said) - 1]).removeprefix(said[-1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", vocabulary=map(SAY, PLAN * 8))


@pytest.fixture
def sglang(checkpoint: Path) -> Iterator[SglangServer]:
    with SglangServer(checkpoint, script=counting) as server:
        yield server


class Job:
    """AReaL's engine, and our workflow as AReaL's trainer names it."""

    def __init__(self, sglang: SglangServer, desktops: FakeServer, checkpoint: Path, directory: Path) -> None:
        from areal.api.cli_args import InferenceEngineConfig, NameResolveConfig
        from areal.engine.sglang_remote import RemoteSGLangEngine
        from areal.utils import name_resolve

        name_resolve.reconfigure(NameResolveConfig(nfs_record_root=str(directory / "names")))
        self.desktops = desktops
        self._checkpoint = checkpoint
        self.engine = RemoteSGLangEngine(
            InferenceEngineConfig(
                backend="sglang:d1",
                experiment_name="desktops",
                trial_name=directory.name,
                max_concurrent_rollouts=4,
                consumer_batch_size=2,
                max_head_offpolicyness=4,
                check_trajectory_format=True,
                request_retries=1,
                pause_grace_period=0.0,
            )
        )
        self.engine.initialize(addr=f"{sglang.host}:{sglang.port}")

    def workflow(self, **envd: Any) -> dict[str, Any]:
        from areal.api.cli_args import GenerationHyperparameters

        return {
            "workflow": "trainer.adapters.areal.workflow.DesktopWorkflow",
            "workflow_kwargs": {
                "gconfig": GenerationHyperparameters(n_samples=1, max_new_tokens=7),
                "tokenizer": str(self._checkpoint),
                "processor": str(self._checkpoint),
                "envd": {"hosts": [self.desktops.address], "agent": AGENT, "attempts": 1, **envd},
            },
        }

    async def roll_out(self, data: Sequence[Mapping[str, Any]], **envd: Any) -> list[dict[str, Any]]:
        """Return the accepted trajectories."""
        return await asyncio.to_thread(self.engine.rollout_batch, [dict(row) for row in data], **self.workflow(**envd))

    def counts(self) -> tuple[int, int]:
        """Return how many rollouts the executor accepted and rejected."""
        stats = self.engine.workflow_executor.staleness_manager.get_stats()
        return stats.accepted, stats.rejected

    def update_weights(self, path: Path) -> None:
        """Do what AReaL's trainer does after a step, with the weights already on disk."""
        from areal.api import WeightUpdateMeta
        from areal.utils import name_resolve, names

        version = self.engine.get_version()
        self.engine.pause()
        self.engine.pause_generation()
        loaded = self.engine.update_weights_from_disk(
            WeightUpdateMeta(type="disk", path=str(path), clear_checkpoint_after_load=False)
        )
        config = self.engine.config
        name_resolve.add(names.update_weights_from_disk(config.experiment_name, config.trial_name, version), "0")
        loaded.result()
        self.engine.continue_generation()
        self.engine.set_version(version + 1)
        self.engine.resume()


@asynccontextmanager
async def job(sglang: SglangServer, checkpoint: Path, directory: Path, **options: Any) -> AsyncIterator[Job]:
    async with serve_fake(**{"size": 4, **options}) as desktops:
        made = await asyncio.to_thread(Job, sglang, desktops, checkpoint, directory)
        loop = made.engine.workflow_executor.runner._loop
        try:
            yield made
        finally:
            await asyncio.to_thread(made.engine.destroy)
        assert not asyncio.all_tasks(loop), "our connections end with AReaL's loop"
        assert desktops.pool.statistics().leased_count == 0


def replies(trajectory: Mapping[str, Any]) -> Iterator[tuple[list[int], list[float], list[int]]]:
    """Yield each row's sampled ids, log-probabilities and versions."""
    for index, mask in enumerate(trajectory["loss_mask"].bool()):
        yield tuple(trajectory[name][index][mask].tolist() for name in ("input_ids", "logprobs", "versions"))


async def test_a_batch_has_the_rows_of_the_tasks_that_could_be_opened(
    sglang: SglangServer, checkpoint: Path, tmp_path: Path
) -> None:
    async with job(sglang, checkpoint, tmp_path) as run:
        batch = await run.roll_out([COUNT, UNKNOWN, COUNT])
        assert run.counts() == (2, 1)
    assert [sorted(one["rewards"].tolist()) for one in batch] == [pytest.approx([0.81, 0.81, 0.9, 0.9, 1.0, 1.0])] * 2
    sampled = [([entry[1] for entry in answer], [entry[0] for entry in answer]) for answer in sglang.answers]
    found = [(ids, log_probs) for one in batch for ids, log_probs, _ in replies(one)]
    assert len(found) == len(sampled) == 12
    for ids, log_probs in found:
        assert any(ids == known and log_probs == pytest.approx(values) for known, values in sampled)
    # The engine read what is trained on: the prompts, with all placeholders of the images.
    prompts = {tuple(request["input_ids"]) for request in sglang.requests}
    for one in batch:
        for index, mask in enumerate(one["attention_mask"]):
            row, length = one["input_ids"][index][mask], int(one["loss_mask"][index].sum())
            assert tuple(row[:-length].tolist()) in prompts


async def test_weights_that_change_during_a_reply_are_recorded_token_by_token(
    sglang: SglangServer, checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    newer = write_checkpoint(tmp_path_factory.mktemp("model") / "newer", vocabulary=map(SAY, PLAN * 8), seed=1)
    async with job(sglang, checkpoint, tmp_path) as run:
        update = Update(run, newer)

        def say(prompt: str) -> str:
            if prompt.count("<|im_start|>assistant\n") == 2:
                update.start_once()
            return counting(prompt)

        sglang.script = say
        (trajectory,) = await run.roll_out([COUNT], group_size=1)
        update.join()
    first, second, third = replies(trajectory)
    assert (set(first[2]), set(third[2])) == ({0}, {1})
    assert sorted(set(second[2])) == [0, 1]
    assert second[2] == sorted(second[2])
    # The reply is whole, and each part has the log-probabilities of the weights that sampled it.
    begun, continued = sglang.answers[1], sglang.answers[2]
    assert second[0] == [entry[1] for entry in (*begun, *continued)]
    assert second[1] == pytest.approx([entry[0] for entry in (*begun, *continued)])
    assert second[2] == [0] * len(begun) + [1] * len(continued)
    assert trajectory["rewards"].tolist() == pytest.approx([0.81, 0.9, 1.0])


class Update:
    """A weight update in its own thread, which has aborted the running requests when `start_once` returns."""

    def __init__(self, run: Job, path: Path) -> None:
        self._aborted = threading.Event()
        self._thread = threading.Thread(target=run.update_weights, args=(path,))
        self._pause: Callable[[], None] = run.engine.pause_generation
        run.engine.pause_generation = self._pause_generation

    def start_once(self) -> None:
        if not self._thread.ident:
            self._thread.start()
            self._aborted.wait()

    def join(self) -> None:
        self._thread.join()

    def _pause_generation(self) -> None:
        self._pause()
        self._aborted.set()


async def test_a_lost_group_is_rejected_and_a_failed_one_has_zeros(
    sglang: SglangServer, checkpoint: Path, tmp_path: Path
) -> None:
    async with job(sglang, checkpoint, tmp_path, faults=Faults(die_after_inputs=0)) as run:
        assert await run.roll_out([COUNT, COUNT]) == []
        assert run.counts() == (0, 2)
    sglang.script = lambda prompt: SAY([Done()])
    async with job(sglang, checkpoint, tmp_path) as run:
        (failed,) = await run.roll_out([COUNT])
        assert run.counts() == (1, 0)
    assert failed["rewards"].tolist() == [0.0, 0.0]


async def test_a_machine_lost_during_an_episode_costs_its_rows_only(
    sglang: SglangServer, checkpoint: Path, tmp_path: Path
) -> None:
    async with job(sglang, checkpoint, tmp_path) as run:
        lost: list[str] = []

        def say(prompt: str) -> str:
            if prompt.count("<|im_start|>assistant\n") == 2 and not lost:
                machine = next(one for one in run.desktops.hypervisor.machines.values() if one.input_count)
                loop.call_soon_threadsafe(machine.kill, "killed by the test")
                lost.append(machine.machine_id)
            return counting(prompt)

        sglang.script = say
        loop = asyncio.get_running_loop()
        (trajectory,) = await run.roll_out([COUNT])
        assert run.counts() == (1, 0)
    assert trajectory["rewards"].tolist() == pytest.approx([0.81, 0.9, 1.0])


async def test_a_dead_engine_rejects_and_gives_no_zeros(sglang: SglangServer, checkpoint: Path, tmp_path: Path) -> None:
    sglang.is_dead = True
    async with job(sglang, checkpoint, tmp_path) as run:
        assert await run.roll_out([COUNT]) == []
        assert run.counts() == (0, 1)
        sglang.is_dead = False
        (trajectory,) = await run.roll_out([COUNT])
    assert trajectory["rewards"].tolist() == pytest.approx([0.81, 0.9, 1.0] * 2)


async def test_a_prepared_batch_is_filled_from_other_tasks(
    sglang: SglangServer, checkpoint: Path, tmp_path: Path
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    async with job(sglang, checkpoint, tmp_path) as run:
        loader = StatefulDataLoader([COUNT, UNKNOWN, COUNT], batch_size=2, collate_fn=list)
        batch = await asyncio.to_thread(run.engine.prepare_batch, loader, **run.workflow())
    assert [sorted(one["rewards"].tolist()) for one in batch] == [pytest.approx([0.81, 0.81, 0.9, 0.9, 1.0, 1.0])] * 2
