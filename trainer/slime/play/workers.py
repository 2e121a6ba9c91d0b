"""Run samples in worker processes behind slime's one RolloutManager: `envd.workers`.

One interpreter bounds the rollouts of one process. Each worker runs whole groups, whose members share machines, in an
event loop of its own. A filled sample comes back through a pipe; the tensors of its pictures stay where the worker
built them, in memory that both processes map. When slime drops them, the worker uses that memory again.
"""

import asyncio
import copyreg
import gc
import io
import itertools
import logging
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from trainer.slime import slime_compat
from trainer.slime.config import Halted
from trainer.slime.play.samples import flatten
from trainer.slime.slime_compat import Sample
from trainer.tokens import patches
from trainer.workers import WorkerProcess

logger = logging.getLogger(__name__)
_ABORT_POLL_S: Final = 0.5
#: For the episodes of a worker whose parent has gone.
_CLOSE_S: Final = 30.0
_ATTEMPTS: Final = 2


class WorkerLost(Exception):
    """A worker process ended while it ran a sample, or cannot return it."""


Play = Callable[..., Coroutine[Any, Any, Any]]
"""A function of a module: takes slime's args, and the arguments of `Workers.play_sample`."""


class Workers:
    """The worker processes of a job. One that ended is replaced when it is needed."""

    def __init__(self, args: Any, count: int, play: Play) -> None:
        """Start nothing yet; `args` are slime's, and `play` plays a sample in a worker."""
        self._args = args
        self._play = play
        self._workers: list[_Worker | None] = [None] * count
        self._lock = threading.Lock()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that run."""
        return [worker.pid for worker in self._workers if worker is not None and not worker.is_lost]

    async def play_sample(self, sample: Sample, params: Mapping[str, Any], **options: Any) -> Any:
        """Play a sample and fill it; return it, or its rows. If its worker ends, it is played once more, `is_alone`.

        Raises:
            Halted: The run cannot go well.
            WorkerLost: The second worker ended too.
        """
        state = slime_compat.generate_state(self._args)
        # The members of a group share machines.
        number = sample.group_index if sample.group_index is not None else sample.index or 0
        for attempt in range(1, _ATTEMPTS + 1):
            worker = await asyncio.to_thread(self._at, number % len(self._workers))
            call = await asyncio.to_thread(worker.call, sample, dict(params), {**options, "is_alone": attempt > 1})
            try:
                filled = await _answer(worker, call, state)
            except WorkerLost as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("[envd] sample %s: %s; it starts over", sample.index, error)
                continue
            rows = filled if isinstance(filled, list) else [filled]
            slime_compat.take_over(sample, rows[0])
            return [sample, *rows[1:]] if isinstance(filled, list) else sample
        raise AssertionError

    def _at(self, index: int) -> "_Worker":
        with self._lock:
            worker = self._workers[index]
            if worker is None or worker.is_lost:
                worker = self._workers[index] = _Worker(self._args, self._play)
            return worker


async def _answer(worker: "_Worker", call: "tuple[int, Future[Any]]", state: Any) -> Any:
    """Return the filled sample of a call. Passes slime's abort and a cancellation on. Raises: Halted, WorkerLost."""
    number, future = call
    waiting = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait({waiting}, timeout=_ABORT_POLL_S))[0]:
            if state.aborted:
                worker.send(("abort", number))
    except asyncio.CancelledError:
        worker.send(("cancel", number))
        raise
    answer = waiting.result()
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Worker:
    """One process, and the calls that it runs. Thread-safe."""

    def __init__(self, args: Any, play: Play) -> None:
        self._process = WorkerProcess(_serve, args, play, name="rollout-worker")
        self._pipe = self._process.pipe
        self.pid = self._process.pid
        self.is_lost = False
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="rollout-worker", daemon=True).start()

    def call(self, sample: Sample, params: Mapping[str, Any], options: Mapping[str, Any]) -> "tuple[int, Future[Any]]":
        """Start a sample; return the call's number, and a future of the filled sample or of an error."""
        future: Future[Any] = Future()
        freed = _freed.setdefault(self.pid, deque())
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = future
            blocks = [freed.popleft() for _ in range(len(freed))]
        if self.is_lost:
            self._lose()
        self.send(("play", number, sample, params, options, blocks))
        return number, future

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; does nothing if the process ended, of which its calls learn otherwise."""
        data = pickle.dumps(message)
        try:
            with self._lock:
                self._pipe.send_bytes(data)
        except OSError:
            pass

    def _read(self) -> None:
        try:
            while True:
                number, answer = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 -- from our own process
                self._calls.pop(number).set_result(answer)
                # It would be kept until the next one arrives.
                del answer
        except Exception as error:
            if not isinstance(error, EOFError | ConnectionError):
                logger.exception("[envd] worker %d: its answer cannot be read", self.pid)
            self.is_lost = True
            self._process.kill()
            self._lose()

    def _lose(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
        # Another process may get its id.
        _freed.pop(self.pid, None)
        for future in calls.values():
            future.set_exception(WorkerLost(f"worker {self.pid} ended with status {self._process.exit_status}"))


#: By process, the blocks of memory that this process no longer uses. Finalizers only append; calls take under a lock.
_freed: dict[int, deque[int]] = {}


def _mapped(pid: int, fd: int, shape: tuple[int, ...]) -> Any:
    """Return a tensor in the memory of a worker. Raises: OSError: The worker ended."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
        values = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int16)
    values = values[: shape[0] * shape[1]].reshape(shape)
    weakref.finalize(values, _freed.setdefault(pid, deque()).append, fd).atexit = False
    return torch.from_numpy(values).view(torch.bfloat16)


# In a worker


def _serve(pipe: Any, args: Any, play: Play) -> None:
    patches.share_memory()
    asyncio.run(_Server(pipe, args, play).serve())


class _Server:
    """Runs the samples that come through a pipe until it is closed."""

    def __init__(self, pipe: Any, args: Any, play: Play) -> None:
        self._pipe = pipe
        self._args = args
        self._play = play
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_aborted = False
        self._held: dict[int, Any] = {}
        self._lock = threading.Lock()

    async def serve(self) -> None:
        closed = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, closed), daemon=True).start()
        await closed.wait()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_CLOSE_S)

    def _read(self, loop: asyncio.AbstractEventLoop, closed: asyncio.Event) -> None:
        try:
            while True:
                message = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 -- from our own process
                loop.call_soon_threadsafe(partial(self._handle, *message))
                del message
        except (EOFError, OSError):
            loop.call_soon_threadsafe(closed.set)

    def _handle(self, kind: str, number: int, *call: Any) -> None:
        if kind == "play":
            if self._is_aborted and not self._tasks:
                # slime starts its next rollout when all samples of the last one have ended.
                self._is_aborted = slime_compat.generate_state(self._args).aborted = False
            self._tasks[number] = asyncio.create_task(self._play_sample(number, *call))
        elif kind == "cancel" and number in self._tasks:
            self._tasks[number].cancel()
        elif kind == "abort" and number in self._tasks and not self._is_aborted:
            self._is_aborted = slime_compat.generate_state(self._args).aborted = True

    async def _play_sample(
        self, number: int, sample: Sample, params: Any, options: Mapping[str, Any], freed: Any
    ) -> None:
        for fd in freed:
            self._held.pop(fd, None)
        filled: Any
        try:
            filled = await self._play(self._args, sample, params, **options)
        except Exception as error:
            filled = error if isinstance(error, Halted) else WorkerLost(f"{type(error).__name__}: {error}")
        finally:
            del self._tasks[number]
        await asyncio.to_thread(self._send, number, filled)
        if not self._tasks and not gc.get_freeze_count():
            # Otherwise each full collection examines all modules and tables again: 0.3 s for which nothing else runs.
            gc.collect()
            gc.freeze()

    def _send(self, number: int, filled: Any) -> None:
        try:
            data = self._pickled((number, filled))
        except Exception as error:
            logger.exception("[envd] a sample cannot be sent")
            data = self._pickled((number, WorkerLost(f"{type(error).__name__}: {error}")))
        for row in flatten([filled]) if not isinstance(filled, Exception) else ():
            # Other references to a sample, as in cycles, must not keep the memory of its tensors.
            row.multimodal_train_inputs = None
        with self._lock:
            self._pipe.send_bytes(data)

    def _pickled(self, answer: Any) -> memoryview:
        """Return an answer, with references to shared tensors, which are held until the other side frees them."""
        import torch  # noqa: PLC0415

        held = dict[int, Any]()

        def reduced(tensor: Any) -> Any:
            fd = patches.shared_by(tensor)
            if fd is None:
                return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            held[fd] = tensor
            return _mapped, (os.getpid(), fd, tuple(tensor.shape))

        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduced}
        pickler.dump(answer)
        # Not before: the other process frees only what it got.
        self._held.update(held)
        return buffer.getbuffer()
