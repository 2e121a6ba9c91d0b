"""A daemon of `envd bench scale` in a process of its own, so that its CPU time and its event loop can be measured.

The benchmark starts `python -m envd.bench.scale_daemon`, which reads a configuration as JSON from standard input. It
writes its progress as JSON lines, and `{"address": ..., "conditions": ...}` once its machines are ready. Each further
line of input ends a measurement and starts the next one. At the end of the input it destroys everything and ends.
"""

import asyncio
import sys
import time

import uvloop

from cuaenv.cli.terminal import err
from envd.base.config import Config
from envd.base.errors import EnvdError
from envd.base.telemetry import logs
from envd.bench.load_client import send_json
from envd.bench.session import Steps, open_bench
from envd.daemon.process import prepare_process

#: How long the task sleeps whose delays are measured.
LAG_INTERVAL_S = 0.01


def main() -> int:
    config = Config.model_validate_json(sys.stdin.readline())
    logs.setup(log_format=config.log_format, level=config.log_level)
    prepare_process()
    try:
        uvloop.run(_serve(config))
    except EnvdError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    return 0


async def _serve(config: Config) -> None:
    loop = asyncio.get_running_loop()
    steps = Steps(lambda stage, _share: send_json({"stage": stage}), 1)
    async with open_bench(config, steps=steps) as session:
        send_json({"address": session.daemon.address, "conditions": session.conditions()})
        lags_ms: list[float] = []
        watching = asyncio.create_task(_watch_lag(lags_ms), name="bench:lag")
        begin_cpu_s = time.process_time()
        while await loop.run_in_executor(None, sys.stdin.readline):
            send_json({"cpu_s": time.process_time() - begin_cpu_s, "lags_ms": lags_ms})
            lags_ms.clear()
            begin_cpu_s = time.process_time()
        watching.cancel()
        await asyncio.wait({watching})


async def _watch_lag(lags_ms: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags_ms.append(max(0.0, time.perf_counter() - before_s - LAG_INTERVAL_S) * 1000)


if __name__ == "__main__":
    sys.exit(main())
