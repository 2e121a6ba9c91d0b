"""Worker processes of a rollout: the memory of tensors that both sides share, without processes."""

import itertools
import pickle
import sys
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slime import Sample
from trainer.slime.play import workers
from trainer.tokens import patches

PID = 999_999_999


class Pipe:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_bytes(self, data: bytes) -> None:
        """Keep a message."""
        self.sent.append(pickle.loads(data))  # noqa: S301 -- our own


def worker_of(pipe: Pipe) -> workers._Worker:
    """Return a worker without a process."""
    worker = object.__new__(workers._Worker)
    worker.pid, worker.is_lost = PID, False
    worker._pipe = pipe  # type: ignore[assignment]
    worker._calls, worker._numbers = {}, itertools.count()
    worker._lock = threading.Lock()
    return worker


def test_calls_in_several_threads_take_freed_blocks_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Freed(deque[int]):
        def popleft(self) -> int:
            assert worker._lock.locked(), "another thread could take the block between count and removal"
            return super().popleft()

    monkeypatch.setattr(workers, "_freed", {PID: Freed([1, 2])})
    worker = worker_of(pipe := Pipe())
    worker.call(Sample(), {}, {})
    worker.call(Sample(), {}, {})
    assert [message[-1] for message in pipe.sent] == [[1, 2], []]


def test_blocks_of_a_lost_worker_are_not_freed_in_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: deque[int] = deque([5])
    monkeypatch.setattr(workers, "_freed", {PID: freed})
    worker_of(Pipe())._lose()
    freed.append(6)  # by a finalizer
    worker_of(pipe := Pipe()).call(Sample(), {}, {})
    assert pipe.sent[0][-1] == []


async def play(*_: Any, **__: Any) -> Any:
    raise AssertionError


def test_an_answer_that_cannot_be_sent_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        shape = (1, 2)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    monkeypatch.setattr(patches, "shared_by", lambda _: 7)
    server = workers._Server(pipe := Pipe(), None, play)
    unpicklable = Sample(multimodal_train_inputs={"pixel_values": Tensor()}, metadata={"lock": threading.Lock()})
    server._send(3, unpicklable)
    (number, error) = pipe.sent[0]
    assert (number, type(error)) == (3, workers.WorkerLost)
    assert server._held == {}
