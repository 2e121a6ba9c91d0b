"""`--partial-rollout` with doubles of slime: an aborted sample continues in its desktop's state, with its tokens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuaenv.client import Action, AsyncEnvClient, Checkpoint, Click, Done
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from tests.support import counting
from tests.support.counting import PARAMS, SAY, TASK, turn_in
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Sample, ScriptedEngine, Tokenizer, stand_in_args, stand_in_slime
from trainer.slime import slime_compat
from trainer.slime.hooks import data_source, generate
from trainer.slime.play.rollout import partial_of
from trainer.slime.play.samples import facts_of

AGENT = {**counting.AGENT, "max_turns": 6}
PLAN: list[list[Action]] = [[Click(640, 125, count=3)], [Click(640, 125)], [Click(640, 125)], [Done()]]


class World:
    """A served fake with checkpoints, and doubles of slime whose rollout can be aborted at a reply."""

    def __init__(self, server: FakeServer, directory: Path) -> None:
        self.server = server
        self.state = SimpleNamespace()
        self.abort_at: set[int] = set()
        """Numbers of the replies during which slime aborts, once each."""
        self._directory = directory

    def say(self, prompt: str) -> str:
        number = turn_in(prompt)
        if number in self.abort_at:
            self.abort_at.remove(number)
            self.state.aborted = True
        return SAY(PLAN[number - 1])

    async def run(self, sample: Sample, **changed: Any) -> None:
        """Run a rollout of one sample."""
        self.state.aborted = False
        envd = {"hosts": [self.server.address], "engine_timeout_s": 20.0, "engine_retries": 1, "agent": AGENT}
        args = stand_in_args(envd, n_samples_per_prompt=1, **{"partial_rollout": True, **changed})
        assert await generate(args, sample, PARAMS) is sample

    async def checkpoints(self) -> list[Checkpoint]:
        async with AsyncEnvClient(self.server.address) as client:
            return await client.list_checkpoints()

    async def all_returned(self) -> None:
        async with asyncio.timeout(60):
            while self.server.pool.statistics().leased_count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world(directory: Path, *, limit_gib: float = 1.0, **options: Any) -> AsyncIterator[World]:
    settings = CheckpointsConfig(limit_gib=limit_gib)
    store = CheckpointStore(directory / "checkpoints", settings=settings, reserve_bytes=0)
    async with serve_fake(size=2, capacity=4, checkpoints=store, **options) as server:
        there = World(server, directory)
        with stand_in_slime(ScriptedEngine(there.say)) as there.state:
            yield there


def sample_of(index: int = 0) -> Sample:
    return Sample(group_index=index, index=index, metadata={"task_id": TASK})


def trained(sample: Sample) -> list[int]:
    """Return the trained tokens."""
    response = sample.tokens[-sample.response_length :]
    return [token for token, mask in zip(response, sample.loss_mask or (), strict=True) if mask]


def replies(numbers: range) -> list[int]:
    """Return the tokens of replies as the engine sampled them."""
    tokenizer = Tokenizer()
    return [token for number in numbers for token in tokenizer.encode(SAY(PLAN[number]) + "<|im_end|>")]


def columns(sample: Sample) -> tuple[Any, ...]:
    return (sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.reward, sample.weight_versions)


@pytest.mark.parametrize("is_masked", [False, True])
async def test_an_aborted_sample_continues_with_its_tokens(tmp_path: Path, is_masked: bool) -> None:
    async with world(tmp_path) as there:
        whole, sample = sample_of(), sample_of(1)
        await there.run(whole)
        there.abort_at = {2, 3}
        for turn_count in (1, 2):
            await there.run(sample, mask_offpolicy_in_partial_rollout=is_masked)
            assert (sample.status.name, facts_of(sample)["void"]) == ("ABORTED", "aborted")
            assert sample.response, "slime notes the rollout in which it began"
            partial = partial_of(sample)
            assert partial is not None
            (checkpoint,) = await there.checkpoints()
            assert (checkpoint, len(partial.point.turns)) == (partial.checkpoint, turn_count)
            await there.all_returned()
        await there.run(sample, mask_offpolicy_in_partial_rollout=is_masked)
        assert (sample.status.name, sample.reward, facts_of(sample)["turns"]) == ("COMPLETED", 1.0, 4)
        assert facts_of(sample)["shared_turns"] == 0
        if is_masked:
            assert sample.tokens == whole.tokens
            assert trained(sample) == replies(range(2, 4))
        else:
            assert columns(sample) == columns(whole)
            assert trained(sample) == replies(range(4))
        assert partial_of(sample) is None
        assert await there.checkpoints() == []


async def test_a_sample_starts_over_without_its_checkpoint(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        sample = sample_of()
        there.abort_at = {3}
        await there.run(sample)
        async with AsyncEnvClient(there.server.address) as client:
            for checkpoint in await client.list_checkpoints():
                await client.delete_checkpoint(checkpoint)
        await there.run(sample, mask_offpolicy_in_partial_rollout=True)
        assert (sample.status.name, sample.reward) == ("COMPLETED", 1.0)
        assert trained(sample) == replies(range(4))


async def test_a_sample_that_cannot_be_stored_starts_over(tmp_path: Path) -> None:
    async with world(tmp_path, limit_gib=1e-6) as there:
        sample = sample_of()
        there.abort_at = {3}
        await there.run(sample)
        assert (sample.status.name, partial_of(sample)) == ("ABORTED", None)
        await there.run(sample)
        assert (sample.status.name, sample.reward) == ("COMPLETED", 1.0)


async def test_an_abort_before_the_first_turn_keeps_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        sample = sample_of()
        there.abort_at = {1}
        await there.run(sample)
        assert (sample.status.name, partial_of(sample)) == ("ABORTED", None)
        assert await there.checkpoints() == []
        await there.all_returned()


async def test_without_the_flag_an_aborted_sample_keeps_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        sample = sample_of()
        there.abort_at = {3}
        await there.run(sample, partial_rollout=False)
        assert (sample.status.name, partial_of(sample)) == ("ABORTED", None)
        assert await there.checkpoints() == []


async def test_a_machine_that_is_lost_is_continued_again(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        sample = sample_of()
        there.abort_at = {2}
        await there.run(sample)
        say = there.say
        killed: list[str] = []

        def kill(prompt: str) -> str:
            if turn_in(prompt) == 3 and not killed:
                for episode in there.server.service.episodes:
                    killed.append(episode.episode_id)
                    episode.machine.machine.kill("killed by a test")  # type: ignore[attr-defined]
            return say(prompt)

        there.say = kill  # type: ignore[method-assign]
        with stand_in_slime(ScriptedEngine(kill)) as there.state:
            await there.run(sample)
        assert len(killed) == 1
        assert (sample.status.name, sample.reward, facts_of(sample)["attempts"]) == ("COMPLETED", 1.0, 2)
        assert trained(sample) == replies(range(4))


def _source() -> Any:
    """Return a double of slime's data source with an empty buffer."""
    return SimpleNamespace(buffer=[], save=lambda rollout_id: None, load=lambda rollout_id=None: None)


async def test_a_killed_trainer_and_daemon_lose_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [_source(), _source()]
    monkeypatch.setattr(slime_compat, "data_source", lambda args: sources.pop())
    saved = {"save": str(tmp_path / "job"), "load": str(tmp_path / "job"), "partial_rollout": True}
    args = stand_in_args({"hosts": ["127.0.0.1:1"]}, **saved)
    async with world(tmp_path) as there:
        sample = sample_of()
        there.abort_at = {3}
        await there.run(sample)
        source = data_source(args)
        source.buffer.append([sample])
        source.save(7)
        address = there.server.address
        await there.server.kill()
    # Another process: nothing of the sample is left in memory.
    del sample, source
    resumed = data_source(args)
    resumed.load(6)
    assert resumed.buffer == []
    resumed.load(7)
    ((sample,),) = resumed.buffer
    async with world(tmp_path, listen=address) as there:
        await there.run(sample)
        assert (sample.status.name, sample.reward) == ("COMPLETED", 1.0)
        assert trained(sample) == replies(range(4))
        assert facts_of(sample)["attempts"] == 1
