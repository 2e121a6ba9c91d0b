"""Sample the replies of a policy for the rollout processes, in the process that trains it.

The weights are the learner's own, so an update needs no transfer; `weight_version` counts updates. Requests join and
leave a batch that is always running (`trainer.learn.sampler`); prompts for which no GPU memory is left are read in
halves. Each rollout process has a server of its own (`trainer.learn.front`), so that slime's abort of one does not end
the requests of another.
"""

import contextlib
import logging
import math
import queue
import shutil
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
import torch

from trainer.learn import LearnError
from trainer.learn.front import EngineReply, EngineRequest, Reads, serve
from trainer.learn.policy import Policy
from trainer.learn.sampler import ReplySampler, SamplerRequest
from trainer.learn.workers import exchange_directory
from trainer.workers import WorkerProcess

logger = logging.getLogger(__name__)
#: How long an idle engine waits for more requests: those of one batch of steps come together.
_GATHER_S = 0.004
#: Tokens between two admissions: reading prompts takes as long as some tokens of all replies.
_ADMIT_EVERY = 4
#: A thread that received a request waits so long for the interpreter while others compute; by default 5 ms.
_SWITCH_S = 0.0002
_STOP_S = 10.0


class PolicyEngine:
    """Sampler of one policy and the processes that serve it over HTTP. Use as a context manager."""

    def __init__(self, policy: Policy, *, seed: int, port_count: int = 1, max_running: int) -> None:
        """Entering starts the processes, each with a free loopback port."""
        self.host = "127.0.0.1"
        self.ports: list[int] = []
        self.weight_version = 0
        self.failure = ""
        """Why it answers no more; empty while it works."""
        self.generator = torch.Generator(device=policy.device).manual_seed(seed)
        self._reads = Reads(
            checkpoint=policy.checkpoint,
            image_px=policy.image_px,
            image_id=policy.image_id,
            image_token_count=policy.image_token_count,
            place_count=2 * max_running,
        )
        self._port_count = port_count
        self._requests = ReplySampler(policy, generator=self.generator, slot_count=max_running)
        self._max_prompts = max_running
        """Prompts to read at once."""
        self._unanswered: dict[SamplerRequest, tuple[Connection, int]] = {}
        self._waiting: queue.SimpleQueue[tuple[Connection, torch.Tensor, EngineRequest] | None] = queue.SimpleQueue()
        self._running = ExitStack()

    def __enter__(self) -> Self:
        sys.setswitchinterval(_SWITCH_S)
        with ExitStack() as running:
            directory = exchange_directory()
            running.callback(shutil.rmtree, directory, ignore_errors=True)
            files = [directory / f"{index}.bin" for index in range(self._port_count)]
            # Each file is as large as all its pictures, and takes memory for those that it had at one time.
            pictures = [_pictures(file, self._reads.pictures_shape) for file in files]
            fronts = []
            for file in files:
                front = WorkerProcess(serve, self._reads, file, name="engine-front")
                running.callback(front.stop, None, timeout_s=_STOP_S)
                fronts.append(front.pipe)
            try:
                self.ports = [pipe.recv() for pipe in fronts]
            except EOFError as error:
                raise LearnError("engine: a process that serves it did not start; its error is above") from error
            sampler = threading.Thread(target=self._run, name="engine", daemon=True)
            running.callback(sampler.join)
            running.callback(self._waiting.put, None)
            sampler.start()
            for given in zip(fronts, pictures, strict=True):
                threading.Thread(target=self._receive, args=given, name="engine-requests", daemon=True).start()
            self._running = running.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def check(self) -> None:
        if self.failure:
            raise LearnError(f"engine: {self.failure}; continue from the last checkpoint with `--resume`")

    def _receive(self, pipe: Connection, pictures: torch.Tensor) -> None:
        """Queue the requests of a process until it ends."""
        while True:
            try:
                self._waiting.put((pipe, pictures, pipe.recv()))
            except (EOFError, OSError):
                self.failure = self.failure or "a process that serves it ended"
                return

    # Sampling

    def _run(self) -> None:
        is_open, waiting = True, list[SamplerRequest]()
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
                    self._send(*self._unanswered.popitem()[1])

    def _gather(self, waiting: list[SamplerRequest]) -> bool:
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
            timeout_s = _GATHER_S if is_idle else 0.0
            pipe, pictures, asked = request
            if self.failure:
                self._send(pipe, asked.place)
                continue
            prompt = SamplerRequest(
                ids=np.frombuffer(asked.ids, np.int32),
                frame_HW3=pictures[asked.place],
                limit=asked.limit,
                temperature=asked.temperature,
                picture=asked.picture,
            )
            self._unanswered[prompt] = pipe, asked.place
            waiting.append(prompt)

    def _admit(self, waiting: list[SamplerRequest]) -> None:
        while waiting and (count := min(len(waiting), self._requests.free_count, self._max_prompts)):
            try:
                ended = self._requests.add(waiting[:count])
            except torch.OutOfMemoryError as error:
                if count == 1:
                    raise LearnError(f"no GPU memory is left for one request: {error}") from error
            else:
                del waiting[:count]
                self._answer(ended)
                continue
            # The traceback, which is gone by now, had the tensors of the pass.
            torch.cuda.empty_cache()
            self._max_prompts = count // 2
            logger.warning("[learn] engine: no GPU memory for %d prompts; it now reads fewer at once", count)

    def _answer(self, ended: Iterable[SamplerRequest]) -> None:
        for request in ended:
            self._send(*self._unanswered.pop(request), request)

    def _send(self, pipe: Connection, place: int, ended: SamplerRequest | None = None) -> None:
        """Send the reply to a request; without one, only the failure."""
        with contextlib.suppress(OSError):  # `_receive` reports that the process ended
            pipe.send(
                EngineReply(
                    place=place,
                    ids=ended.reply_ids if ended else [],
                    log_probs=ended.log_probs if ended else [],
                    is_complete=ended is not None and ended.is_complete,
                    weight_version=self.weight_version,
                    failure=self.failure,
                )
            )


def _pictures(file: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a file of so many bytes, and return it as a tensor."""
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=torch.uint8).view(shape)
