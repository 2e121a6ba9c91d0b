"""What the trainer relies on in SGLang's `/generate`: one suite for the real server and for `tests.support.sglang`.

```python
class TestServer(EngineContract):
    pass
```

Needs torch and transformers, and the fixtures `engine` (has a `url`), `checkpoint`, `other_checkpoint` (other weights),
`chat` (`chat_of`) and `model` (a `SglangServer` that is not started).
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
from PIL import Image

from tests.support.sglang import SglangServer
from trainer.agent.types import Message, data_uri
from trainer.gateway.engine import gateway_engine
from trainer.gateway.gateway import TokenGateway
from trainer.gateway.record import token_row
from trainer.gateway.server import serve
from trainer.gateway.settings import GatewaySettings
from trainer.tokens.chat import Chat
from trainer.tokens.engine_client import EngineClient
from trainer.tokens.picture_files import PictureFiles
from trainer.tokens.rows import Segment
from trainer.tokens.sglang import is_context_full

#: Log-probabilities of the engine and of transformers, both in single precision.
TOLERANCE = 0.02


class Engine(Protocol):
    """A server."""

    @property
    def url(self) -> str: ...


def chat_of(checkpoint: Path) -> Chat:
    """Return the chat format of a tiny model."""
    from transformers import AutoProcessor, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return Chat(tokenizer, AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True))


async def post(engine: Engine, path: str, body: Any) -> tuple[int, Any]:
    """Return the status and the JSON or text of a response."""
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/{path}", json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


def special_bias(chat: Chat) -> dict[str, float]:
    """Return a bias against special tokens: random weights would sample them, trained ones do not."""
    names = ("<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return {str(chat.encode(name)[0]): -100.0 for name in names}


def picture(width_px: int, height_px: int) -> Image.Image:
    """Return a picture without a repeated pattern."""
    return Image.linear_gradient("L").resize((width_px, height_px)).convert("RGB")


def request_for(chat: Chat, prompt: Segment, *, extra: Sequence[int] = (), **params: Any) -> dict[str, Any]:
    """Return a request for a reply of 8 tokens after a prompt and more ids."""
    return {
        "input_ids": [*prompt.engine_ids, *extra],
        "image_data": [data_uri(image) for image in prompt.images] or None,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 1.0,
            "logit_bias": special_bias(chat),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            **params,
        },
    }


class EngineContract:
    """The suite."""

    @pytest.mark.parametrize("sizes", [[], [(256, 160)], [(31, 200)], [(640, 400), (64, 64), (320, 200)]])
    async def test_prompts_and_replies_are_counted_and_scored_as_the_model_does(
        self, engine: Engine, chat: Chat, model: SglangServer, sizes: list[tuple[int, int]]
    ) -> None:
        prompt = chat.opening([Message("user", (*(picture(*size) for size in sizes), "Look."))])
        request = request_for(chat, prompt)
        status, answer = await post(engine, "generate", request)
        assert status == 200, answer
        meta = answer["meta_info"]
        ids = [entry[1] for entry in meta["output_token_logprobs"]]
        assert meta["prompt_tokens"] == len(prompt.train_ids)
        assert meta["completion_tokens"] == len(ids)
        assert answer["text"] == chat.decode(ids)
        bias = {int(token): value for token, value in request["sampling_params"]["logit_bias"].items()}
        inputs = model.pixels(prompt.images)
        recomputed = model.log_probs(prompt.train_ids, ids, inputs, bias=bias)
        for (log_prob, *_), mine in zip(meta["output_token_logprobs"], recomputed, strict=True):
            assert log_prob == pytest.approx(mine, abs=TOLERANCE)

    async def test_pictures_in_files_are_read(
        self, engine: Engine, chat: Chat, model: SglangServer, tmp_path: Path
    ) -> None:
        prompt = chat.opening([Message("user", (picture(256, 160), picture(64, 64), "Look."))])
        files, request = PictureFiles(str(tmp_path / "a b")), request_for(chat, prompt)
        request["image_data"] = [files.add(image).decode("ascii") for image in prompt.images]
        status, answer = await post(engine, "generate", request)
        assert status == 200, answer
        sampled = answer["meta_info"]["output_token_logprobs"]
        bias = {int(token): value for token, value in request["sampling_params"]["logit_bias"].items()}
        ids, inputs = [token for _, token, _ in sampled], model.pixels(prompt.images)
        recomputed = model.log_probs(prompt.train_ids, ids, inputs, bias=bias)
        assert [log_prob for log_prob, *_ in sampled] == pytest.approx(recomputed, abs=TOLERANCE)

    async def test_ids_that_are_not_what_their_text_tokenises_to_are_kept(self, engine: Engine, chat: Chat) -> None:
        prompt = chat.opening([Message("user", (picture(64, 64), "Look."))])
        split = [token for character in "computer" for token in chat.encode(character)]
        assert len(chat.encode("computer")) < len(split)
        _, answer = await post(engine, "generate", request_for(chat, prompt, extra=split))
        assert answer["meta_info"]["prompt_tokens"] == len(prompt.train_ids) + len(split)

    async def test_a_reply_ends_by_length_or_with_the_end_of_turn(self, engine: Engine, chat: Chat) -> None:
        prompt = chat.opening([Message("user", ("Look.",))])
        (end,) = chat.encode("<|im_end|>")
        for bias, finish in ((-100.0, "length"), (100.0, "stop")):
            request = request_for(chat, prompt, logit_bias={**special_bias(chat), str(end): bias})
            _, answer = await post(engine, "generate", request)
            assert answer["meta_info"]["finish_reason"]["type"] == finish
            ids = [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]]
            assert (ids == [end]) == (finish == "stop")
            assert answer["text"] == chat.decode(ids)

    async def test_an_abort_ends_running_requests(self, engine: Engine, chat: Chat) -> None:
        prompt = chat.opening([Message("user", ("Look.",))])
        (end,) = chat.encode("<|im_end|>")
        bias = {**special_bias(chat), str(end): -100.0}
        asking = asyncio.create_task(
            post(engine, "generate", request_for(chat, prompt, logit_bias=bias, max_new_tokens=4000))
        )
        async with aiohttp.ClientSession() as session:
            running = 0
            while not running and not asking.done():
                async with session.get(f"{engine.url}/v1/loads") as response:
                    running = (await response.json())["loads"][0]["num_running_reqs"]
        await post(engine, "abort_request", {"abort_all": True})
        _, answer = await asking
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    async def test_a_prompt_beyond_the_context_is_refused_as_such(self, engine: Engine, chat: Chat) -> None:
        (letter,) = chat.encode("a")
        for length, room in ((33_000, 8), (32_764, 20)):
            request = {"input_ids": [letter] * length, "sampling_params": {"max_new_tokens": room}}
            status, answer = await post(engine, "generate", request)
            assert is_context_full(status, str(answer)), (status, answer)

    async def test_prompts_with_other_placeholders_than_images_are_refused(self, engine: Engine, chat: Chat) -> None:
        prompt = chat.opening([Message("user", (picture(64, 64), "Look."))])
        spelled = [token for character in "<|image_pad|>" for token in chat.encode(character)]
        assert chat.placeholder_in(spelled) == "<|image_pad|>"
        for extra in (prompt.engine_ids, spelled, chat.encode("<|video_pad|>")):
            status, answer = await post(engine, "generate", request_for(chat, prompt, extra=extra))
            assert status in {400, 500}, answer
            assert not is_context_full(status, str(answer))
        broken = {**request_for(chat, prompt), "image_data": ["data:image/png;base64,AAAA"]}
        status, _ = await post(engine, "generate", broken)
        assert status == 500

    async def test_new_weights_change_the_replies_and_their_version(
        self, engine: Engine, chat: Chat, model: SglangServer, checkpoint: Path, other_checkpoint: Path
    ) -> None:
        prompt = chat.opening([Message("user", (picture(256, 160), "Look."))])
        request = request_for(chat, prompt)
        bias = {int(token): value for token, value in request["sampling_params"]["logit_bias"].items()}
        inputs = model.pixels(prompt.images)
        for version, path in (("b", other_checkpoint), ("a", checkpoint)):
            await post(engine, "pause_generation", {})
            update = {"model_path": str(path), "weight_version": version}
            status, answer = await post(engine, "update_weights_from_disk", update)
            assert (status, answer["success"]) == (200, True)
            await post(engine, "continue_generation", {})
            _, answer = await post(engine, "generate", request)
            assert answer["meta_info"]["weight_version"] == version
            entries = answer["meta_info"]["output_token_logprobs"]
            recomputed = model.log_probs(prompt.train_ids, [entry[1] for entry in entries], inputs, bias=bias)
            gap = max(abs(entry[0] - mine) for entry, mine in zip(entries, recomputed, strict=True))
            assert (gap < TOLERANCE) == (version == "a")

    async def test_a_gateway_records_what_the_engine_sampled(
        self, engine: Engine, chat: Chat, model: SglangServer
    ) -> None:
        bias = special_bias(chat)
        limits = GatewaySettings(reply_tokens=8, engine_attempts=1, sampling={"temperature": 1.0, "logit_bias": bias})
        client = EngineClient()
        gateway = TokenGateway(chat, partial(gateway_engine, engine.url, client, limits), settings=limits)
        messages: list[Any] = []
        async with serve(gateway) as url, aiohttp.ClientSession() as http:
            for turn in range(3):
                shown = {"type": "image_url", "image_url": {"url": data_uri(picture(96 + 64 * turn, 64))}}
                messages.append({"role": "user", "content": [shown, {"type": "text", "text": f"Look {turn}."}]})
                path = f"{url}/sessions/s/v1/chat/completions"
                async with http.post(path, json={"model": "m", "messages": messages}) as response:
                    answer = await response.json()
                assert response.status == 200, answer
                messages.append(answer["choices"][0]["message"])
            (recorded,) = gateway.find("s").rows
        client.close()
        row = token_row(recorded.row)
        start = len(row.tokens) - row.response_length
        inputs = model.pixels(recorded.row.trained_images)
        recomputed = model.log_probs(
            row.tokens[:start], row.tokens[start:], inputs, bias={int(token): value for token, value in bias.items()}
        )
        assert recorded.row.reply_count == 3
        for sampled, log_prob, mine in zip(row.loss_mask, row.log_probs, recomputed, strict=True):
            assert not sampled or log_prob == pytest.approx(mine, abs=TOLERANCE)
