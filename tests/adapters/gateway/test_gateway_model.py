"""The gateway with a real tokenizer, processor and model: exact tokens, and pictures that both sides see."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import openai
import pytest

from tests.support.engine_contract import TOLERANCE, chat_of, special_bias
from tests.support.gateway import picture_url
from tests.support.sglang import SglangServer
from tests.support.sight import FAULTS, SETTINGS, Fault, check, examine, plant, plant_messages, reply
from trainer.adapters.areal.rows import Rewarded, batch
from trainer.gateway.engine import GatewayEngine
from trainer.gateway.gateway import Gateway
from trainer.gateway.record import areal_turns, token_row
from trainer.gateway.server import serve
from trainer.gateway.settings import GatewaySettings
from trainer.gateway.sight import played
from trainer.learn.checkpoint import write_checkpoint
from trainer.learn.sight import ModelServer, tiny_model
from trainer.sight.episode import plan_of
from trainer.sight.model import Model
from trainer.slime.play.engine import EngineClient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tiny_model(tmp_path_factory.mktemp("model"), SETTINGS))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_pictures_are_found_through_the_gateway(
    model: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    plant(fault, monkeypatch)

    class Server(ModelServer):
        def reply(self, ids: Sequence[int], images: Sequence[Any], *, limit: int) -> tuple[list[int], list[float]]:
            return reply(model, fault, ids, images, limit=limit)

    with Server(model) as server:
        episodes = asyncio.run(played(SETTINGS, model, f"http://{server.host}:{server.ports[0]}"))
    check(examine(plan_of(SETTINGS), episodes, model, fault), fault)


def test_pictures_that_the_harness_loses_are_found(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault({"engine": {2, 3}, "learner": {2, 3}}, lost_turns=frozenset({2, 3}))
    plant_messages(fault, monkeypatch)
    with ModelServer(model) as server:
        episodes = asyncio.run(played(SETTINGS, model, f"http://{server.host}:{server.ports[0]}"))
    check(examine(plan_of(SETTINGS), episodes, model, fault), fault)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("engine") / "tiny", vocabulary=["Look at the screen."] * 8)
    with SglangServer(checkpoint) as server:
        server.checkpoint = checkpoint  # type: ignore[attr-defined]
        yield server


async def test_sampled_ids_of_a_model_are_kept_turn_by_turn(engine: SglangServer) -> None:
    chat = chat_of(engine.checkpoint)  # type: ignore[attr-defined]
    sampling = {"temperature": 1.0, "logit_bias": special_bias(chat)}
    limits = GatewaySettings(reply_tokens=12, sampling=sampling, engine_attempts=1)
    client = EngineClient()
    gateway = Gateway(chat, partial(GatewayEngine, engine.url, client, limits), settings=limits)
    messages: list[Any] = []
    async with serve(gateway) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0) as harness:
            for turn in range(4):
                picture = {"type": "image_url", "image_url": {"url": picture_url(turn * 60, size=(96 + 32 * turn, 64))}}
                messages.append({"role": "user", "content": [{"type": "text", "text": f"Look {turn}."}, picture]})
                answer = await harness.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        (recorded,) = gateway.find("s").rows
    client.close()
    row = token_row(recorded.row)
    sampled = [token for token, bit in zip(row.tokens[-row.response_length :], row.loss_mask, strict=True) if bit]
    assert sampled == [entry[1] for entries in engine.answers for entry in entries]
    log_probs = [each for each, bit in zip(row.log_probs, row.loss_mask, strict=True) if bit]
    assert log_probs == [entry[0] for entries in engine.answers for entry in entries]
    # Random replies are not what their text tokenises to: tokenising again would change them.
    assert chat.encode(chat.decode(sampled)) != sampled
    inputs = engine.pixels(recorded.row.trained_images)
    prompt = len(row.tokens) - row.response_length
    turns = areal_turns(recorded.row)
    bias = {int(token): value for token, value in special_bias(chat).items()}
    for turn in turns:
        images = engine.pixels(turn.images)
        mine = engine.log_probs(turn.input_ids, turn.output_ids, images, bias=bias)
        assert list(turn.log_probs) == pytest.approx(mine, abs=TOLERANCE)
    assert prompt < len(turns[0].input_ids) + 1
    tensors = batch([Rewarded(turn, 1.0) for turn in turns], chat)
    assert tensors["input_ids"].shape[0] == 4
    assert int(tensors["loss_mask"].sum()) == len(sampled)
    assert len(tensors["multi_modal_input"]) == 4
    assert inputs["image_grid_thw"].shape[0] == 4
