"""The process of one shard, with programs of Python's library in its place."""

import asyncio
import signal

import pytest

from envd.daemon.shards import process
from envd.daemon.shards.process import ShardProcess


def shard_process(lines: list[str]) -> ShardProcess:
    return ShardProcess(3, {"index": 3}, print_line=lines.append)


async def test_a_program_that_reports_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    # It reads its input to the end, which does not come.
    monkeypatch.setattr(process, "PROGRAM", "json.tool")
    monkeypatch.setattr(process, "SILENCE_S", 0.5)
    running = shard_process([])
    async with asyncio.timeout(60):
        assert await running.run() == -signal.SIGKILL
    assert not running.ready.is_set()


async def test_a_cancelled_run_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PROGRAM", "json.tool")
    running = shard_process([])
    task = asyncio.create_task(running.run())
    async with asyncio.timeout(60):
        while running.pid is None:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert running._process is not None
    # Its input ended, so it was not killed.
    assert running._process.returncode is not None
    assert running._process.returncode >= 0
