"""slime's generate function plays a harness, a process of its own, against a gateway and a drawn desktop."""

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import until
from tests.support.counting import AGENT, PARAMS, TASK, turn_in
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Sample, ScriptedEngine, Tokenizer, stand_in_args, stand_in_slime
from trainer.config import InputError
from trainer.gateway.slime import generate
from trainer.slime.play.samples import facts_of, flatten, is_void

HARNESS = Path(__file__).parents[1] / "support/harnesses/counting.py"
SAID = ["640 125 3", "640 125 2", "done"]
TOKENIZER = Tokenizer()


def say(prompt: str) -> str:
    return SAID[min(turn_in(prompt), 3) - 1]


@asynccontextmanager
async def world(say: Callable[[str], str] = say) -> AsyncIterator[tuple[FakeServer, ScriptedEngine]]:
    engine = ScriptedEngine(say)
    async with serve_fake(size=2, capacity=4) as server:
        with stand_in_slime(engine):
            yield server, engine


def args_of(server: FakeServer, fault: str = "none", *, harness: dict[str, Any] | None = None, **envd: Any) -> Any:
    agent = {**AGENT, "max_turns": 6, "images_per_row": 4, "timeout_s": 300.0, "context_tokens": 65_536}
    mapping = {"hosts": [server.address], "engine_timeout_s": 20.0, "engine_retries": 1, "attempts": 1, "agent": agent}
    command = [sys.executable, str(HARNESS), fault]
    path = str(HARNESS.parents[3])
    given = {"command": command, "env": {"PYTHONPATH": f"{path}:{path}/proto"}, **(harness or {})}
    return stand_in_args({**mapping, **envd}, n_samples_per_prompt=1, harness=given)


async def all_returned(server: FakeServer) -> None:
    await until(lambda: server.pool.statistics().leased_count == 0)


async def played(args: Any) -> list[Any]:
    sample = Sample(group_index=0, index=0, metadata={"task_id": TASK})
    return flatten([await generate(args, sample, PARAMS)])


async def test_a_harness_plays_an_episode_and_its_row_is_the_engines() -> None:
    async with world() as (server, engine):
        (sample,) = await played(args_of(server))
        assert (sample.status.name, sample.reward) == ("COMPLETED", 1.0), facts_of(sample)
        trained = [
            token
            for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask or (), strict=True)
            if mask
        ]
        assert trained == [token for text in SAID for token in TOKENIZER.encode(f"{text}<|im_end|>")]
        requests = [request for request in engine.requests if "image_data" in request]
        for before, after in itertools.pairwise(requests):
            assert after["input_ids"][: len(before["input_ids"])] == before["input_ids"]
        facts = facts_of(sample)
        assert (facts["turns"], facts["reason"], facts["task_score"]) == (3, "done", 1.0)
        assert sample.weight_versions == ["7"] * 3
        assert sample.multimodal_train_inputs is not None
        await all_returned(server)


@pytest.mark.parametrize(
    ("fault", "harness", "reason", "words"),
    [
        ("exit", {}, "HarnessFailed", "exit status 1; its output ends with 'the harness fails"),
        ("hang", {"timeout_s": 8.0}, "HarnessTimeout", "did not end within 8 s"),
        ("talk", {"output_bytes": 1000}, "HarnessOutput", "wrote more than 1000 bytes"),
        ("mute", {}, "NoReply", "without a reply"),
        ("close", {}, "EpisodeNotFound", ""),
        ("none", {"command": ["/nowhere/harness"]}, "HarnessFailed", "could not be started"),
    ],
)
async def test_a_harness_that_fails_is_void_and_never_a_score(
    fault: str, harness: dict[str, Any], reason: str, words: str
) -> None:
    async with world() as (server, _):
        (sample,) = await played(args_of(server, fault, harness=harness))
        assert is_void(sample)
        assert facts_of(sample)["void"] == reason, facts_of(sample)
        assert words in facts_of(sample)["error"]
        await all_returned(server)


async def test_a_harness_that_never_stops_is_scored_after_its_turns() -> None:
    async with world() as (server, _):
        samples = await played(args_of(server, "endless"))
        assert [sample.status.name for sample in samples] == ["TRUNCATED"]
        assert (samples[0].reward, facts_of(samples[0])["reason"]) == (1.0, "images")


@pytest.mark.parametrize(
    ("envd", "words"),
    [
        ({"agent": AGENT}, "images_per_row"),
        ({"group": "tree"}, "cannot be copied"),
        ({"reward": {"recipe": "task", "strict": True}}, "strict"),
    ],
)
async def test_a_configuration_that_cannot_work_is_refused(envd: dict[str, Any], words: str) -> None:
    async with world() as (server, _):
        with pytest.raises(InputError, match=words):
            await played(args_of(server, **envd))
    with pytest.raises(InputError, match="no mapping `harness:`"):
        await played(stand_in_args({"hosts": ["h:1"]}))
    with pytest.raises(InputError, match="program"):
        await played(stand_in_args({"hosts": ["h:1"]}, harness={"program": []}))
