"""A process that works for this one: it answers, and it ends however it is left."""

import os
import time
from multiprocessing.connection import Connection

import pytest

from trainer.workers import WorkerProcess


def echo(pipe: Connection, word: str) -> None:
    """Answer messages until None comes."""
    while (message := pipe.recv()) is not None:
        pipe.send((word, message, os.getpid()))


def sleep(_: Connection) -> None:
    time.sleep(300)


def test_a_worker_answers_and_stops_by_its_last_message() -> None:
    worker = WorkerProcess(echo, "heard", name="worker")
    worker.pipe.send(1)
    assert worker.pipe.recv() == ("heard", 1, worker.pid)
    statuses = [worker.exit_status]
    worker.stop(None, timeout_s=60)
    assert [*statuses, worker.exit_status] == [None, 0]
    assert worker.pipe.closed


def test_a_worker_that_does_not_stop_is_killed() -> None:
    worker = WorkerProcess(sleep, name="worker")
    worker.stop(None, timeout_s=0.01)
    assert worker.exit_status == -9


def test_the_pipe_of_a_killed_worker_ends() -> None:
    worker = WorkerProcess(echo, "heard", name="worker")
    worker.kill()
    with pytest.raises(EOFError):
        worker.pipe.recv()
    worker.stop(None, timeout_s=1)
