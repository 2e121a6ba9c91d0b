"""`SightEnv` on verifiers' runner and training client, and a small model, with planted faults.

The engine is vLLM's route `/inference/v1/generate`, as verifiers' renderers call it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest
import verifiers.v1 as vf

from tests.adapters.verifiers.verifiers_sight import SightEnv, turns_of
from tests.support.sight import AGENT, FAULTS, SETTINGS, Fault, check, examine, picture_of, plant_messages, reply
from trainer.adapters.verifiers import DesktopConfig, DesktopEnvConfig
from trainer.agent.grammars import Picture
from trainer.learn.checkpoint import write_checkpoint
from trainer.sight.model import SightModel

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


#: Tokens that verifiers' renderer of Qwen3-VL requires.
PIECES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SightModel:
    directory, instructions = (
        tmp_path_factory.mktemp("model") / "tiny",
        SETTINGS.make_grammar().instructions(Picture(1001, 1001)),
    )
    return SightModel(write_checkpoint(directory, vocabulary=[instructions] * 8, pieces=PIECES, seed=1))


class Engine:
    """vLLM's engine, with a model in this process."""

    def __init__(self, model: SightModel, fault: Fault) -> None:
        self._model, self._fault = model, fault
        self._turn = asyncio.Lock()
        self.temperatures = set[float]()

    async def generate(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        body = await request.json()
        self.temperatures.add(body["sampling_params"]["temperature"])
        urls = [part["url"] for part in body.get("content_parts", ())]
        images = [picture_of(url.partition(",")[2]) for url in urls]
        processor = self._model.processor.image_processor
        inputs = processor(images=images, return_tensors="pt") if images else {}
        prompt = self._model.expanded(body["token_ids"], inputs)
        async with self._turn:
            ids, log_probs = await asyncio.to_thread(reply, self._model, self._fault, prompt, images, limit=12)
        content = [{"token": f"token_id:{each}", "logprob": value} for each, value in zip(ids, log_probs, strict=True)]
        ended = ids[-1] == self._model.tokenizer.eos_token_id
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop" if ended else "length",
        }
        places = [place for place, token in enumerate(prompt) if token == self._model.image_id]
        starts = [place for place in places if place - 1 not in places]
        ends = [place for place in places if place + 1 not in places]
        runs = [{"offset": start, "length": end - start + 1} for start, end in zip(starts, ends, strict=True)]
        answer = {
            "request_id": "1",
            "choices": [choice],
            "prompt_token_ids": prompt,
            "mm_placeholders": {"image": runs},
        }
        return aiohttp.web.json_response(answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = aiohttp.web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self.generate)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        await runner.cleanup()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_planted_faults_are_found(fault: Fault, model: SightModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_messages(fault, monkeypatch)
    engine, path = Engine(model, fault), str(Path(model.model.config._name_or_path))
    episodes: list[Any] = []
    async with engine.serving() as url:
        tasks = [f"sight/{number}" for number in range(5)]
        config = DesktopEnvConfig(taskset=DesktopConfig(id="envd-desktop", tasks=tasks), agent=AGENT)
        client = vf.TrainClientConfig(
            base_url=url, api_key_var="NO_KEY", renderer={"name": "qwen3-vl"}, renderer_model_name=path
        )
        context = vf.ModelContext(model=path, client=client, sampling=vf.SamplingConfig(temperature=0.0))
        env = SightEnv(config)
        async with env.serving():
            for task in list(env.taskset):
                (slot,) = env.slots(task, 1)
                episode = await env.run_slot(slot, context)
                assert episode.ok, [trace.errors for trace in episode.traces] or episode.errors
                episodes += [turns_of(trace, model.processor) for trace in episode.traces]
    report = examine(env.plan, episodes, model, fault)
    check(report, fault)
    assert engine.temperatures == {0.0}
