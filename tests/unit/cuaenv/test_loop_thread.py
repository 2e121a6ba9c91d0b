import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from cuaenv import loop_thread
from cuaenv.loop_thread import LoopThread


async def name() -> str:
    return threading.current_thread().name


async def never() -> None:
    await asyncio.Event().wait()


def test_coroutines_run_in_the_thread_until_it_is_closed() -> None:
    before = threading.active_count()
    thread = LoopThread("loop of a test")
    assert thread.start(name()).result() == "loop of a test"
    thread.close()
    assert threading.active_count() == before
    assert thread.loop.is_closed()
    thread = LoopThread("loop of a test")
    thread.close()
    thread.close(never)


def test_closing_runs_the_last_coroutine_and_then_cancels_the_others() -> None:
    thread, order = LoopThread("loop of a test"), list[str]()

    async def waiting() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            order.append("cancelled")

    async def last() -> None:
        order.append("last")

    running = thread.start(waiting())
    thread.close(last)
    assert order == ["last", "cancelled"]
    with pytest.raises(CancelledError):
        running.result(timeout=0)


def test_the_thread_ends_although_the_last_coroutine_fails() -> None:
    thread = LoopThread("loop of a test")

    async def last() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        thread.close(last)
    assert thread.loop.is_closed()


def test_a_task_that_ignores_its_cancellation_does_not_keep_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_LAST_TASKS_S", 0.1)
    thread, cancelled = LoopThread("loop of a test"), threading.Event()

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await never()
            cancelled.set()

    async def last() -> None:
        await asyncio.sleep(0)

    # Its future keeps the task: nothing else refers to one that waits for an event of its own.
    ignoring = thread.start(stubborn())
    closing = threading.Thread(target=thread.close, args=(last,), daemon=True)
    closing.start()
    closing.join(timeout=30)
    assert cancelled.is_set()
    assert not ignoring.done()
    assert thread.loop.is_closed()


def test_an_error_at_the_end_of_a_cancelled_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread("loop of a test")

    async def failing() -> None:
        try:
            await never()
        finally:
            raise OSError("not released")

    async def start() -> None:
        failing_task.append(asyncio.create_task(failing()))
        await asyncio.sleep(0)

    failing_task: list[asyncio.Task[None]] = []
    thread.start(start()).result()
    thread.close()
    failing_task.clear()
    gc.collect()
    assert "not released" in caplog.text


def test_closing_in_a_forked_process_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("loop of a test")
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: thread.pid + 1)
        thread.close(never)
    assert thread.start(name()).result() == "loop of a test"
    thread.close()


def test_it_ends_with_the_process_although_its_executor_was_used() -> None:
    program = (
        "import asyncio, atexit\n"
        "from cuaenv.loop_thread import LoopThread\n"
        "thread = LoopThread('loop of a test')\n"
        "atexit.register(thread.close)\n"
        "assert thread.start(asyncio.to_thread(int, '1')).result() == 1\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
