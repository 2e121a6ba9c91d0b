"""Serve a policy by SGLang's `/generate` from the process that trains it.

The weights are the learner's own, so an update needs no transfer; `weight_version` counts updates. Requests join and
leave a batch that is always running (`trainer.learn.sampler`); prompts for which no GPU memory is left are read in
halves. Each rollout process has a port of its own, so that slime's abort of one does not end the requests of another.
"""

import asyncio
import base64
import io
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from aiohttp import web
from PIL import Image

from trainer.learn.errors import LearnError
from trainer.learn.policy import Policy
from trainer.learn.sampler import Prompt, Sampled, Sampler

logger = logging.getLogger(__name__)
#: How long an idle engine waits for more requests: those of one batch of steps come together.
_GATHER_S = 0.004
#: Tokens between two admissions: reading prompts takes as long as some tokens of all replies.
_ADMIT_EVERY = 4
_SWITCH_S = 0.0002
_MAX_REQUEST_BYTES = 256 << 20
#: Decoded pictures, half a megabyte each, that are kept for requests with the same one. Decoding takes 1.7 ms; of 136
#: requests of seven groups, 88 repeated a picture.
_FRAMES_KEPT = 256


class _Port:
    """The routes of one rollout process."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._aborted_count = 0
        self._running_count = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/v1/loads", self._loads)
        return app

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._running_count, "num_waiting_reqs": 0}]})

    async def _abort(self, _: web.Request) -> web.Response:
        self._aborted_count += 1
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        payload, aborted_count = await request.json(), self._aborted_count
        self._running_count += 1
        try:
            answer = await self._engine.generate(payload, is_aborted=lambda: self._aborted_count != aborted_count)
        except LearnError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        finally:
            self._running_count -= 1
        return web.json_response(answer)


class Engine:
    """HTTP server and sampler of one policy. Use as a context manager."""

    def __init__(self, policy: Policy, *, seed: int, port_count: int = 1, max_running: int) -> None:
        """Entering starts the server on free loopback ports."""
        self.host = "127.0.0.1"
        self.ports: list[int] = []
        self.weight_version = 0
        self.failure = ""
        """Why it answers no more; empty while it works."""
        self.generator = torch.Generator(device=policy.device).manual_seed(seed)
        self._policy = policy
        self._requests = Sampler(policy, generator=self.generator, slot_count=max_running)
        self._max_prompts = max_running
        """Prompts to read at once."""
        self._unanswered: dict[Prompt, Future[Sampled]] = {}
        self._waiting: queue.SimpleQueue[tuple[Prompt, Future[Sampled]] | None] = queue.SimpleQueue()
        self._port_count = port_count
        self._loop = asyncio.new_event_loop()
        self._server = threading.Thread(target=self._loop.run_forever, name="engine-http", daemon=True)
        self._sampler = threading.Thread(target=self._run, name="engine", daemon=True)
        self._runners: list[web.AppRunner] = []

    def __enter__(self) -> Self:
        # While the HTTP thread computes, each token would wait the default 5 ms for the interpreter, several times.
        sys.setswitchinterval(_SWITCH_S)
        self._server.start()
        self._sampler.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        self._sampler.join()
        for runner in self._runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._server.join()
        self._loop.close()

    def check(self) -> None:
        """Check that it still samples. Raises: LearnError."""
        if self.failure:
            raise LearnError(f"engine: {self.failure}; continue from the last checkpoint with `--resume`")

    # HTTP

    async def _start(self) -> None:
        for _ in range(self._port_count):
            runner = web.AppRunner(_Port(self).app(), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            self._runners.append(runner)
            await web.TCPSite(runner, self.host, 0, backlog=1024).start()
            self.ports.append(runner.addresses[0][1])

    async def generate(self, payload: Mapping[str, Any], *, is_aborted: Callable[[], bool]) -> dict[str, Any]:
        """Answer a request. Raises: LearnError: It is malformed, or sampling failed."""
        prompt = await asyncio.to_thread(self._read, payload)
        self.check()
        answer: Future[Sampled] = Future()
        self._waiting.put((prompt, answer))
        sampled = await asyncio.wrap_future(answer)
        finish = "stop" if sampled.is_complete else "length"
        if is_aborted():
            finish = "abort"
        entries = [[log_prob, token, None] for log_prob, token in zip(sampled.log_probs, sampled.ids, strict=True)]
        return {
            "text": self._policy.tokenizer.decode(sampled.ids, skip_special_tokens=False),
            "meta_info": {
                "finish_reason": {"type": finish},
                "output_token_logprobs": entries,
                "prompt_tokens": len(prompt.ids),
                "completion_tokens": len(sampled.ids),
                "cached_tokens": 0,
                "weight_version": str(self.weight_version),
            },
        }

    def _read(self, payload: Mapping[str, Any]) -> Prompt:
        """Decode a request. Raises: LearnError: It has not exactly one image of the right size."""
        policy = self._policy
        uris, ids = payload.get("image_data") or [], payload["input_ids"]
        if len(uris) != 1 or ids.count(policy.image_id) != 1:
            raise LearnError(f"request: {len(uris)} images; a row must hold one: set images_per_row to 1")
        frame_HW3 = _frame(uris[0])
        height, width, _ = frame_HW3.shape
        if (width, height) != policy.image_px:
            raise LearnError(f"request: an image of {(width, height)} pixels; the policy reads {policy.image_px}")
        place = ids.index(policy.image_id)
        sampling = payload["sampling_params"]
        return Prompt(
            ids=[*ids[:place], *[policy.image_id] * policy.image_token_count, *ids[place + 1 :]],
            frame_HW3=frame_HW3,
            limit=int(sampling["max_new_tokens"]),
            temperature=float(sampling.get("temperature", 1.0)),
        )

    # Sampling

    def _run(self) -> None:
        is_open, waiting = True, list[Prompt]()
        while is_open or waiting or self._requests.running_count:
            try:
                is_open &= self._gather(waiting)
                self._admit(waiting)
                for _ in range(_ADMIT_EVERY):
                    self._answer(self._requests.step())
            except Exception as error:
                logger.exception("[learn] engine: sampling failed")
                self.failure = str(error) if isinstance(error, LearnError) else f"{type(error).__name__}: {error}"
                waiting.clear()
                self._requests.drop()
                while self._unanswered:
                    self._unanswered.popitem()[1].set_exception(LearnError(self.failure))

    def _gather(self, waiting: list[Prompt]) -> bool:
        """Add the prompts that have come to `waiting`; returns whether more may come."""
        is_idle = not waiting and not self._requests.running_count
        timeout_s = None if is_idle else 0.0
        while True:
            try:
                request = self._waiting.get(timeout_s != 0, timeout_s)
            except queue.Empty:
                return True
            if request is None:
                return False
            prompt, answer = request
            self._unanswered[prompt] = answer
            waiting.append(prompt)
            timeout_s = _GATHER_S if is_idle else 0.0

    def _admit(self, waiting: list[Prompt]) -> None:
        while waiting and (count := min(len(waiting), self._requests.free_count, self._max_prompts)):
            try:
                ended = self._requests.add(waiting[:count])
            except torch.OutOfMemoryError as error:
                if count == 1:
                    raise LearnError(f"no GPU memory is left for one request: {error}") from error
                torch.cuda.empty_cache()
                self._max_prompts = count // 2
                logger.warning("[learn] engine: no GPU memory for %d prompts; it now reads fewer at once", count)
            else:
                del waiting[:count]
                self._answer(ended)

    def _answer(self, ended: Mapping[Prompt, Sampled]) -> None:
        for prompt, reply in ended.items():
            self._unanswered.pop(prompt).set_result(reply)


@lru_cache(maxsize=_FRAMES_KEPT)
def _frame(uri: str) -> torch.Tensor:
    """Decode a picture: (height, width, 3) uint8. Equal ones are one tensor, which the sampler then encodes once."""
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")
    return torch.from_numpy(np.array(image))
