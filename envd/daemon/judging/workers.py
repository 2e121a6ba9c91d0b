"""Judge what a guest made in sandboxed processes, so that a hostile input costs one evaluation at most.

A picture, a text or a document of a guest can keep a decoder busy for hours, fill the memory, or hold the interpreter
lock; and the code of an evaluator can change the process that runs it. In the daemon, each of these would reach every
episode. Here each job has a process of its own, which ends with it. What needs more memory or CPU
time than the limit scores 0, as a file that is too large does: the host had both, so an agent must not void its episode
by it. If the host is or may be the reason, the evaluation fails with `EvaluatorFailed`. Then the task's start is judged
too (`envd.episodes.evaluating`), so that no agent gains by a busy host or a decoder that it can crash.
"""

import asyncio
import json
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import envd
from envd.base.clock import running_timeout
from envd.base.errors import EvaluatorFailed, GuestError
from envd.base.sandbox.enclosure import EnclosureError
from envd.base.sandbox.fork_server import ForkServer
from envd.daemon.judging.worker import EXCEEDED_CPU, HEADER
from envd.tasks.text import CheckOutcome, CheckResult

logger = logging.getLogger(__name__)

#: Evidence is cut to 2,000 characters later; a job that a guest has taken over must not fill our memory.
_MAX_ANSWER_BYTES = 256 << 10
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath}


class JudgeWorkers:
    """Runs judge functions, each in a sandboxed process of its own: a fork of one that has imported them.

    A job that is not done after `quick_s` is run again among the slow ones, which have slots of their own. So hostile
    inputs that use all of their time delay each other, and other jobs by `quick_s` each at most.

    Args:
        limit: Maximum of concurrent quick jobs, and of concurrent slow ones; further jobs wait.
        cpu_s: CPU time of a job, in seconds.
        quick_s: Time of a quick job from its start, in seconds.
        time_s: Time of a slow job from its start, in seconds.
        visible: Directories that jobs can read, besides the Python environment and this package.
    """

    def __init__(
        self,
        *,
        limit: int | None = None,
        memory_mib: int = 1024,
        cpu_s: int = 10,
        quick_s: float = 2.0,
        time_s: float = 30.0,
        visible: Sequence[str] = (),
    ) -> None:
        limit = limit or max(2, len(os.sched_getaffinity(0)))
        self._slots = asyncio.Semaphore(limit)
        self._slow_slots = asyncio.Semaphore(limit)
        self._quick_s = quick_s
        self._time_s = time_s
        # Relative entries are directories of the daemon's own working directory.
        path = [str(Path(envd.__file__).parents[1]), *(entry for entry in sys.path if os.path.isabs(entry))]
        # Without -P, modules of the working directory would hide all others.
        command = (sys.executable, "-P", "-m", "envd.daemon.judging.worker", str(memory_mib), str(cpu_s), *visible)
        self._server = ForkServer(command, {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)})
        self._is_warned = False

    def __repr__(self) -> str:
        return f"<JudgeWorkers {'running' if self._server.pid else 'not running'}>"

    async def __call__(self, function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
        """See `envd.tasks.checkers.base.Judge`. If the caller is cancelled, the job is ended."""
        job = pickle.dumps((function, arguments))
        try:
            try:
                async with self._slots:
                    answer = await self._run(function.__module__, job, time_s=self._quick_s)
            except TimeoutError:
                async with self._slow_slots:
                    answer = await self._run(function.__module__, job, time_s=self._time_s)
        except TimeoutError as error:
            raise EvaluatorFailed(f"judging it took longer than {self._time_s:g} s") from error
        if "bug" in answer:
            raise RuntimeError(f"{function.__name__}: {answer['bug']}")
        if "excess" in answer:
            return CheckOutcome(0.0, str(answer["excess"]))
        if "guest_error" in answer:
            raise GuestError(str(answer["guest_error"]))
        try:
            return _outcome(answer)
        except ValueError as error:
            raise EvaluatorFailed(f"the process that judged it was changed: {error}") from error

    async def aclose(self) -> None:
        """Stop the process that starts jobs. Jobs end with their callers."""
        await self._server.aclose()

    async def _run(self, module: str, job: bytes, *, time_s: float) -> Mapping[str, Any]:
        """Return a job's answer. Raises: EvaluatorFailed: The job ended without one. TimeoutError: It took too long."""
        try:
            await self._start()
            with await self._server.open_job(module) as channel:
                async with running_timeout(time_s):
                    return _parse(await _exchange(channel, HEADER.pack(len(job)) + job))
        except TimeoutError:  # an OSError
            raise
        except (OSError, ValueError) as error:
            raise EvaluatorFailed(f"the process that judged it was ended: {error}") from error

    async def _start(self) -> None:
        try:
            greeting = await self._server.start()
        except EnclosureError as error:
            raise RuntimeError(f"judge worker did not start: {error}") from error
        if not self._is_warned:
            self._is_warned = True
            for level, text in ((logging.WARNING, greeting["warning"]), (logging.INFO, greeting["note"])):
                if text:
                    logger.log(level, "judge workers: %s", text)


async def _exchange(channel: socket.socket, job: bytes) -> bytes:
    """Send a job; return all that comes back. Raises: OSError, ValueError: It is too much."""
    loop = asyncio.get_running_loop()
    data = b""
    # A job that ends before it has read all of its input has said why.
    with suppress(BrokenPipeError, ConnectionResetError):
        await loop.sock_sendall(channel, job)
    with suppress(ConnectionResetError):
        while part := await loop.sock_recv(channel, 1 << 16):
            data += part
            if len(data) > _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return data


def _parse(data: bytes) -> Mapping[str, Any]:
    """Return the answer in what came back from a job. Raises: ValueError: There is none."""
    try:
        messages = [json.loads(line) for line in data.splitlines()]
    except RecursionError:
        raise ValueError("malformed answer") from None
    if not messages or not all(isinstance(message, dict) for message in messages) or "end" not in messages[-1]:
        raise ValueError("malformed answer")
    answer: Mapping[str, Any] = messages[0]
    end = messages[-1]["end"]
    if end == f"exited with status {EXCEEDED_CPU}":
        return {"excess": "judging it needs more CPU time than its limit"}
    if end or len(messages) != 2:
        raise ValueError(str(answer.get("failure") or end or "malformed answer"))
    return answer


def _outcome(answer: Mapping[str, Any]) -> CheckOutcome:
    """Return the outcome in an answer. Raises: ValueError: It is malformed, as of a job that a guest has taken over."""
    try:
        parts = tuple(
            CheckResult(name=str(name), score=float(score), evidence=str(evidence))
            for name, score, evidence in answer["parts"]
        )
        outcome = CheckOutcome(float(answer["score"]), str(answer["evidence"]), parts)
    except (KeyError, TypeError) as error:
        raise ValueError(f"malformed answer: {error!r}") from error
    if not all(0 <= score <= 1 for score in (outcome.score, *(part.score for part in outcome.parts))):
        raise ValueError("malformed answer: a score outside 0 to 1")
    return outcome
