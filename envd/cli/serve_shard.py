"""The program of one shard; `envd.daemon.shards.process` starts it and describes its pipes."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

import uvloop

from envd.base.config import Config
from envd.base.errors import ConfigError, EnvdError
from envd.base.telemetry import logs
from envd.cli.serve import Serving
from envd.daemon.process import prepare_process
from envd.daemon.service_manager import ServiceManager
from envd.daemon.shards.layout import Shard, shard_config
from envd.daemon.shards.process import REPORT_INTERVAL_S, STOP

_PR_SET_PDEATHSIG: Final = 1

Write = Callable[[dict[str, Any]], None]


class _SupervisorReports(ServiceManager):
    """Reports to the supervisor instead of systemd."""

    def __init__(self, write: Write) -> None:
        super().__init__({})
        self._write = write
        self._watchdog_s = 2 * REPORT_INTERVAL_S

    def _send(self, state: str) -> None:
        if state == "READY=1":
            self._write({"ready": True})
        elif state == "WATCHDOG=1":
            self._write({"alive": True})


def main() -> int:
    """Serve until the supervisor says stop, or its end of the pipe is closed."""
    # Like the machines of an embedded driver, a shard does not outlive the process that owns the endpoint.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Unbuffered: the commands that follow belong to the event loop.
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        settings = json.loads(pipe.readline())
    config = Config.model_validate(settings["config"])
    shard = Shard(index=settings["index"], whole=config)
    logs.setup(log_format=config.log_format, level=config.log_level)
    prepare_process()
    with logs.bound(shard=str(shard.index)):
        try:
            uvloop.run(_serve(shard_config(config, shard.index), shard))
        except EnvdError as error:
            sys.stderr.write(f"error: shard {shard.index}: {error}\n")
            return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _serve(config: Config, shard: Shard) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Handlers, which programs that this one starts do not inherit. A service manager signals every process of a
        # service, and a shard ends when the supervisor says so.
        loop.add_signal_handler(number, lambda: None)
    commands = asyncio.create_task(_obey(stop, hurry), name="shard:commands")

    def write(report: dict[str, Any]) -> None:
        os.write(1, json.dumps(report).encode() + b"\n")

    try:
        await Serving(
            config,
            print_line=lambda line: write({"line": line}),
            stop=stop,
            hurry=hurry,
            manager=_SupervisorReports(write),
            shard=shard,
        ).run()
    finally:
        commands.cancel()
        await asyncio.wait({commands})


async def _obey(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Follow commands until the supervisor closes the pipe; then stop at once."""
    reader = asyncio.StreamReader()
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # noqa: ASYNC230 -- a pipe, read by the event loop
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            async for line in reader:
                if line.strip().decode() == STOP:
                    (hurry if stop.is_set() else stop).set()
            stop.set()
            hurry.set()
        finally:
            transport.close()


if __name__ == "__main__":
    sys.exit(main())
