"""A server with SGLang's `/generate` and a real model on a CPU, in its own thread.

```python
with SglangServer(checkpoint, script=say) as server:
    args.sglang_router_ip, args.sglang_router_port = server.host, server.port
```

As in SGLang, a prompt has one placeholder, or a run of them, per image, and images are data URIs or bare base64; the
server decodes and expands them. A random model produces no valid actions, so a script may set the reply; its
log-probabilities are still the model's own. Needs aiohttp, torch and transformers.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from trainer.learn.server import GenerateServer, answer_of, picture_of

Script = Callable[[str], str | None]
"""Maps the decoded prompt to the reply, or to None to sample one."""


class SglangServer(GenerateServer):
    """One engine and its router. Use as a context manager."""

    def __init__(self, checkpoint: Path, *, script: Script | None = None, seed: int = 0) -> None:
        """Load the model; entering starts the server on a free loopback port."""
        import torch
        from transformers import AutoProcessor

        torch.manual_seed(seed)
        super().__init__()
        self.requests: list[Mapping[str, Any]] = []
        """Requests, in order."""
        self.answers: list[Sequence[Any]] = []
        """`output_token_logprobs` of the replies to requests that ask for it, without those of probes: one token."""
        self.is_dead = False
        """Whether the engine is dead: it cuts requests off, the router still answers."""
        self.weight_version = "1"
        self.prompt_token_error = 0
        """Added to the reported count of prompt tokens."""
        self.tokenises_again = False
        """Whether it tokenises the text of prompts with images again, as SGLang with slime's patch does."""
        self._model: Any = _load(checkpoint)
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
        self._tokenizer = self._processor.tokenizer
        self._image_id = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._context_length = int(self._model.config.text_config.max_position_embeddings)
        self._end_id = self._tokenizer.eos_token_id
        self._suppressed = [i for i in self._tokenizer.all_special_ids if i != self._end_id]
        self.script = script
        self._pause_count = 0
        # One thread: torch's generator is shared.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tiny-model")
        self._generates = asyncio.Event()
        self._generates.set()

    @property
    def port(self) -> int:
        """Its port."""
        return self.ports[0]

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.host}:{self.port}"

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._executor.shutdown()

    def abort_running(self) -> None:
        """Abort the running requests, as SGLang does when a weight update pauses it; half of each reply is returned."""
        self._pause_count += 1

    def make_app(self) -> web.Application:
        """Return the routes of an engine that slime did not start."""
        app = super().make_app()
        app.middlewares.append(self._cut_off_if_dead)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        return app

    @web.middleware
    async def _cut_off_if_dead(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if self.is_dead and request.path == "/generate":
            assert request.transport is not None
            request.transport.abort()
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        """Return what slime asks an engine that it did not start."""
        return web.json_response({"tp_size": 1, "enable_memory_saver": False})

    async def _pause(self, _: web.Request) -> web.Response:
        self.abort_running()
        self._generates.clear()
        return web.json_response({})

    async def _continue(self, _: web.Request) -> web.Response:
        self._generates.set()
        return web.json_response({})

    async def _update_weights(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self._model = await asyncio.get_running_loop().run_in_executor(self._executor, _load, asked["model_path"])
        self.weight_version = asked.get("weight_version") or str(int(self.weight_version) + 1)
        return web.json_response({"success": True, "message": ""})

    async def generate(self, payload: Mapping[str, Any], *, is_aborted: Callable[[], bool]) -> dict[str, Any]:
        """Answer a request."""
        await self._generates.wait()
        self.requests.append(payload)
        pause_count = self._pause_count
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._answer, payload, lambda: is_aborted() or self._pause_count != pause_count
        )

    def _answer(self, payload: Mapping[str, Any], is_aborted: Callable[[], bool]) -> dict[str, Any]:
        if is_aborted():
            finish_reason = {"type": "abort", "message": "Abort before prefill"}
            return {"text": "", "meta_info": {"finish_reason": finish_reason, "weight_version": self.weight_version}}
        images = [picture_of(uri).convert("RGB") for uri in payload.get("image_data") or ()]
        inputs = self.pixels(images)
        text = self._tokenizer.decode(payload["input_ids"])
        if images and self._processor.video_token in text:
            raise _refusal(f"No data iterator found for token: {self._processor.video_token}")
        encoded = self._tokenizer.encode(text, add_special_tokens=False) if images else payload["input_ids"]
        ids = encoded if self.tokenises_again else payload["input_ids"]
        if encoded.count(self._image_id) != list(ids).count(self._image_id):
            raise ValueError("the prompt's text has another number of placeholders than its ids")
        prompt = self._expanded(ids, inputs.get("image_grid_thw", ()))
        wanted = self.script(text) if self.script else None
        room = int(payload["sampling_params"]["max_new_tokens"])
        if len(prompt) + room > self._context_length:
            raise _refusal(
                f"Requested token count exceeds the model's maximum context length of {self._context_length}"
            )
        temperature = float(payload["sampling_params"].get("temperature", 1.0))
        given = payload["sampling_params"].get("logit_bias") or {}
        bias = {int(token_id): float(value) for token_id, value in given.items()}
        if wanted is None:
            reply = self._sampled(prompt, inputs, room, temperature, bias)
        else:
            reply = [*self._tokenizer.encode(wanted, add_special_tokens=False), self._end_id][:room]
        log_probs = self.log_probs(prompt, reply, inputs, temperature, bias)
        finish = "stop" if reply[-1] == self._end_id else "length"
        if is_aborted():
            reply, finish = reply[: len(reply) // 2], "abort"
        answer = answer_of(
            self._tokenizer.decode(reply, skip_special_tokens=False),
            reply,
            log_probs[: len(reply)],
            finish=finish,
            prompt_tokens=len(prompt) + self.prompt_token_error,
            weight_version=self.weight_version,
        )
        columns = answer["meta_info"]
        if not payload.get("return_logprob"):
            del columns["output_token_logprobs"]
        elif room > 1:
            self.answers.append(columns["output_token_logprobs"])
        if (payload["sampling_params"].get("custom_params") or {}).get("return_top_p_token_ids"):
            # As with slime's patch; here the set of each token is that token alone.
            columns["top_p_token_ids"], columns["top_p_token_offsets"] = reply, list(range(len(reply) + 1))
        return answer

    def pixels(self, images: Sequence[Any]) -> Mapping[str, Any]:
        """Return images as the model's inputs in single precision; trainers keep half of it."""
        inputs: Mapping[str, Any] = (
            self._processor.image_processor(images=list(images), return_tensors="pt") if images else {}
        )
        return inputs

    def log_probs(
        self,
        prompt: Sequence[int],
        reply: Sequence[int],
        inputs: Mapping[str, Any],
        temperature: float = 1.0,
        bias: Mapping[int, float] | None = None,
    ) -> list[float]:
        """Return the model's log-probabilities of a reply.

        Args:
            prompt: Ids with one placeholder per image token.
            reply: Ids.
            inputs: `pixel_values` and `image_grid_thw`; empty without images.
            temperature: Of the sampling.
            bias: Added to the logits of ids.
        """
        import torch

        with torch.no_grad():
            logits = self._model(**self._inputs([*prompt, *reply], inputs)).logits[0, len(prompt) - 1 : -1]
            for token_id, value in (bias or {}).items():
                logits[:, token_id] += value
            table = torch.log_softmax(logits / temperature, dim=-1)
        return [float(table[position, token_id]) for position, token_id in enumerate(reply)]

    def _sampled(
        self, prompt: Sequence[int], inputs: Mapping[str, Any], room: int, temperature: float, bias: Mapping[int, float]
    ) -> list[int]:
        import torch

        with torch.no_grad():
            made = self._model.generate(
                **self._inputs(prompt, inputs),
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=room,
                eos_token_id=self._end_id,
                # Random weights would sample these, trained ones do not.
                suppress_tokens=self._suppressed,
                sequence_bias={(token_id,): value for token_id, value in bias.items()} or None,
                pad_token_id=self._tokenizer.pad_token_id,
            )
        reply: list[int] = made[0, len(prompt) :].tolist()
        return reply

    def _inputs(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        input_ids = torch.tensor([list(ids)])
        floats = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
        kinds = (input_ids == self._image_id).int()
        return {"input_ids": input_ids, "mm_token_type_ids": kinds, **floats}

    def _expanded(self, ids: Sequence[int], grids: Sequence[Any]) -> list[int]:
        counts = iter([int(grid.prod()) // self._processor.image_processor.merge_size**2 for grid in grids])
        # Images are separated by other tokens, so a run of placeholders is one image.
        one_each = [
            token_id
            for token_id, before in zip(ids, [None, *ids], strict=False)
            if token_id != self._image_id or token_id != before
        ]
        if one_each.count(self._image_id) != len(grids):
            raise ValueError(f"{len(grids)} images, but another number of placeholders")
        return [
            repeated
            for token_id in one_each
            for repeated in [token_id] * (next(counts) if token_id == self._image_id else 1)
        ]


def _load(checkpoint: Path | str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(checkpoint).eval()


def _refusal(message: str) -> web.HTTPBadRequest:
    """Return SGLang's response to an invalid request; its response to one that it cannot process has status 500."""
    text = json.dumps({"error": {"message": message}})
    return web.HTTPBadRequest(text=text, content_type="application/json")
