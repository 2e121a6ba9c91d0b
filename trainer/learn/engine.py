"""Serve a policy by SGLang's `/generate` from the process that trains it.

The weights are the learner's own, so an update needs no transfer; `weight_version` counts updates. Requests join and
leave a batch that is always running (`trainer.learn.sampler`); prompts for which no GPU memory is left are read in
halves. Each rollout process has a port of its own, so that slime's abort of one does not end the requests of another.
"""

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch

from trainer.learn import LearnError
from trainer.learn.policy import Policy
from trainer.learn.sampler import Prompt, Sampled, Sampler
from trainer.learn.server import GenerateServer, answer_of, picture_of

logger = logging.getLogger(__name__)
#: How long an idle engine waits for more requests: those of one batch of steps come together.
_GATHER_S = 0.004
#: Tokens between two admissions: reading prompts takes as long as some tokens of all replies.
_ADMIT_EVERY = 4
_SWITCH_S = 0.0002
#: Decoded pictures, half a megabyte each, that are kept for requests with the same one. Decoding takes 1.7 ms; of 136
#: requests of seven groups, 88 repeated a picture.
_FRAMES_KEPT = 256


class Engine(GenerateServer):
    """HTTP server and sampler of one policy. Use as a context manager."""

    def __init__(self, policy: Policy, *, seed: int, port_count: int = 1, max_running: int) -> None:
        """Entering starts the server on free loopback ports."""
        super().__init__(port_count=port_count)
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
        self._sampler = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        # While the HTTP thread computes, each token would wait the default 5 ms for the interpreter, several times.
        sys.setswitchinterval(_SWITCH_S)
        self._sampler.start()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        self._waiting.put(None)
        self._sampler.join()
        super().__exit__(*raised)

    def check(self) -> None:
        if self.failure:
            raise LearnError(f"engine: {self.failure}; continue from the last checkpoint with `--resume`")

    # HTTP

    async def generate(self, payload: Mapping[str, Any], *, is_aborted: Callable[[], bool]) -> dict[str, Any]:
        """Answer a request. Raises: LearnError: It is malformed, or sampling failed."""
        prompt = await asyncio.to_thread(self._read, payload)
        self.check()
        answer: Future[Sampled] = Future()
        self._waiting.put((prompt, answer))
        sampled = await asyncio.wrap_future(answer)
        finish = "abort" if is_aborted() else "stop" if sampled.is_complete else "length"
        return answer_of(
            self._policy.tokenizer.decode(sampled.ids, skip_special_tokens=False),
            sampled.ids,
            sampled.log_probs,
            finish=finish,
            prompt_tokens=len(prompt.ids),
            weight_version=str(self.weight_version),
        )

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
    return torch.from_numpy(np.array(picture_of(uri).convert("RGB")))
