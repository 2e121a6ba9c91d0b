"""Judge what a guest made in sandboxed worker processes, so that a hostile input costs one evaluation at most.

A picture, a text or a document of a guest can keep a decoder busy for hours, fill the memory, or hold the interpreter
lock. In the daemon, each of these would stop every episode. Here they end one worker. What needs more memory or CPU
time than the limit scores 0, as a file that is too large does: the host had both, so an agent must not void its episode
by it. If the host is or may be the reason, the evaluation fails with `EvaluatorFailed`. Then the task's start is judged
too (`envd.episodes.evaluating`), so that no agent gains by a busy host or a decoder that it can crash.
"""

import asyncio
import json
import logging
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import envd
from envd.base.clock import running_timeout
from envd.base.errors import EvaluatorFailed, GuestError
from envd.daemon.judging.worker import EXCEEDED_CPU, HEADER
from envd.tasks.text import CheckOutcome, CheckPart

logger = logging.getLogger(__name__)

#: Evidence is cut to 2,000 characters later; a worker that a guest has taken over must not fill our memory.
_MAX_ANSWER_BYTES = 256 << 10
#: A worker that does not run for so long while it starts is stuck. On a busy host the start itself may take longer.
_STALL_S = 60.0
#: CPU time of a start: 0.6 s with compiled modules, 1.6 s without, measured on one core.
_START_CPU_S = 60.0
#: A worker whose judging process has ended ends by itself.
_EXIT_TIMEOUT_S = 5.0
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class JudgeWorkers:
    """Runs judge functions in worker processes, one job at a time in each. Workers start on demand and are reused.

    A job that is not done after `quick_s` is run again among the slow ones, which have slots of their own. So hostile
    inputs that use all of their time delay each other, and other jobs by `quick_s` each at most.

    Args:
        limit: Maximum of concurrent quick jobs, and of concurrent slow ones; further jobs wait.
        cpu_s: CPU time of a job, in seconds.
        quick_s: Time of a quick job from its start, in seconds.
        time_s: Time of a slow job from its start, in seconds.
        visible: Directories that workers can read, besides the Python environment and this package.
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
        cores = len(os.sched_getaffinity(0))
        limit = limit or max(2, cores)
        # Starts that share a core delay each other, and a worker that has started soon serves those that wait.
        self._starts = asyncio.Semaphore(max(1, cores // 4))
        self._slots = asyncio.Semaphore(limit)
        self._slow_slots = asyncio.Semaphore(limit)
        self._quick_s = quick_s
        self._limits = (str(memory_mib), str(cpu_s), *visible)
        self._time_s = time_s
        self._idle: list[Process] = []
        self._is_warned = False

    def __repr__(self) -> str:
        return f"<JudgeWorkers {sum(worker.returncode is None for worker in self._idle)} idle>"

    async def __call__(self, function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
        """See `envd.tasks.checkers.base.Judge`. If the caller is cancelled, the worker is killed."""
        job = pickle.dumps((function, arguments))
        try:
            try:
                async with self._slots:
                    answer = await self._run(job, time_s=self._quick_s)
            except TimeoutError:
                async with self._slow_slots:
                    answer = await self._run(job, time_s=self._time_s)
        except TimeoutError as error:
            raise EvaluatorFailed(f"judging it took longer than {self._time_s:g} s") from error
        if "bug" in answer:
            raise RuntimeError(f"{function.__name__}: {answer['bug']}")
        if "excess" in answer:
            return CheckOutcome(0.0, str(answer["excess"]))
        if "guest_error" in answer:
            raise GuestError(str(answer["guest_error"]))
        parts = (CheckPart(str(name), float(score), str(evidence)) for name, score, evidence in answer["parts"])
        return CheckOutcome(float(answer["score"]), str(answer["evidence"]), tuple(parts))

    async def aclose(self) -> None:
        """End the idle workers. Those that judge end with their callers."""
        while self._idle:
            await _end(self._idle.pop())

    async def _run(self, job: bytes, *, time_s: float) -> Mapping[str, Any]:
        """Return a worker's answer. Raises: EvaluatorFailed: The worker ended. TimeoutError: It took too long."""
        worker = self._idle_worker()
        if worker is None:
            async with self._starts:
                worker = self._idle_worker() or await self._start()
        is_reusable = False
        try:
            async with running_timeout(time_s):
                answer = await _ask(worker, job)
            is_reusable = not answer.get("retire", False)
        except TimeoutError:  # an OSError
            raise
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            await _wait_for_exit(worker)
            if worker.returncode == EXCEEDED_CPU:
                return {"excess": "judging it needs more CPU time than its limit"}
            raise EvaluatorFailed("the process that judged it was ended") from error
        else:
            return answer
        finally:
            if is_reusable:
                self._idle.append(worker)
            else:
                await _end(worker)

    def _idle_worker(self) -> Process | None:
        while self._idle:
            worker = self._idle.pop()
            # The kernel ends workers first when memory runs out, idle ones too.
            if worker.returncode is None:
                return worker
        return None

    async def _start(self) -> Process:
        root = str(Path(envd.__file__).parents[1])
        path = os.pathsep.join(entry for entry in [root, *sys.path] if entry)
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "envd.daemon.judging.worker", *self._limits),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,  # until it is ready
            env={**_ENVIRONMENT, "PYTHONPATH": path, "PATH": os.defpath},
            limit=_MAX_ANSWER_BYTES,
            # Ctrl-C in a terminal reaches the whole group; the daemon ends its workers itself.
            start_new_session=True,
        )
        try:
            ready = await _first_answer(worker)
        except (TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            if isinstance(error, TimeoutError):
                worker.kill()  # a process that is stopped does not handle other signals
            elif isinstance(error, asyncio.IncompleteReadError):
                await _wait_for_exit(worker)
            await _end(worker)
            status = f"status {worker.returncode}; {await _last_words(worker)}"
            raise RuntimeError(f"judge worker did not start: {error or 'malformed answer'} ({status})") from error
        except BaseException:
            await _end(worker)
            raise
        if not self._is_warned:
            self._is_warned = True
            for level, text in ((logging.WARNING, ready["warning"]), (logging.INFO, ready["note"])):
                if text:
                    logger.log(level, "judge workers: %s", text)
        return worker


async def _first_answer(worker: Process) -> Mapping[str, Any]:
    """Return the answer with which a worker is ready.

    Raises:
        IncompleteReadError: It ended.
        TimeoutError: It did not run for `_STALL_S`, or used more than `_START_CPU_S`.
        ValueError: The answer is malformed.
    """
    reading = asyncio.ensure_future(_read(worker))
    used_s = -1.0
    try:
        while not (await asyncio.wait({reading}, timeout=_STALL_S))[0]:
            before_s, used_s = used_s, _cpu_s(worker.pid)
            if used_s == before_s:
                raise TimeoutError(f"it did not run for {_STALL_S:g} s")
            if used_s > _START_CPU_S:
                raise TimeoutError(f"it used {used_s:.0f} s of CPU time")
        return reading.result()
    finally:
        reading.cancel()


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _last_words(worker: Process) -> str:
    """Return the last line that a worker wrote before it was ready, such as its exception."""
    assert worker.stderr is not None  # noqa: S101 -- started with a pipe
    text = (await worker.stderr.read()).decode(errors="replace").strip()
    return text.rpartition("\n")[2] or "it wrote no error"


async def _ask(worker: Process, job: bytes) -> Mapping[str, Any]:
    assert worker.stdin is not None  # noqa: S101 -- started with a pipe
    worker.stdin.write(HEADER.pack(len(job)) + job)
    await worker.stdin.drain()
    return await _read(worker)


async def _read(worker: Process) -> Mapping[str, Any]:
    """Return a worker's next answer. Raises: IncompleteReadError: It ended. ValueError: The answer is malformed."""
    assert worker.stdout is not None  # noqa: S101 -- started with a pipe
    [size] = HEADER.unpack(await worker.stdout.readexactly(HEADER.size))
    if size > _MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    answer = json.loads(await worker.stdout.readexactly(size))
    if not isinstance(answer, dict):
        raise ValueError("an answer that is not an object")  # noqa: TRY004 -- malformed, as above
    return answer


async def _wait_for_exit(worker: Process) -> None:
    """Wait a while for a worker that closed its output: a signal to one that just ended loses its exit status."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_TIMEOUT_S):
            await worker.wait()


async def _end(worker: Process) -> None:
    if worker.returncode is None:
        # The worker then kills the process that judges, and removes its control group.
        worker.terminate()
    await asyncio.shield(worker.wait())
