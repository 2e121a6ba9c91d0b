"""`python -m tests.soak`: random episodes, faults and killed clients against a daemon of its own, for a given time."""

import asyncio
import secrets
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from cuaenv.cli.terminal import Json, progress
from envd.base.config import Config
from envd.cli.command import command
from envd.cli.own_daemon import ensure_image, own_daemon_options
from envd.cli.terminal import print_result
from tests.soak.report import SoakReport
from tests.soak.run import soak, soak_config

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


# Warnings are about injected faults; all others are in the report.
@command(own_daemon_options(log_level="error"))
def soak_command(
    settings: Config,
    *,
    minutes: Annotated[float, typer.Option("--minutes", metavar="N", min=0.05, help="How long clients play.")] = 10.0,
    machines: Annotated[int, typer.Option("--machines", metavar="M", min=2, max=256, help="The pool's capacity.")] = 4,
    seed: Annotated[
        str, typer.Option("--seed", metavar="S", help="Seed of all randomness.", show_default="random")
    ] = "",
    as_json: Json = False,
) -> None:
    """Play random episodes under random faults; fail on lost or repeated actions, wrong scores, or leftovers."""
    ensure_image(settings)
    playing = _run(
        soak_config(settings, machine_count=machines),
        images=settings.cache_dir / "images",
        seed=seed or secrets.token_hex(4),
        machine_count=machines,
        duration_s=minutes * 60,
    )
    try:
        report = uvloop.run(playing)
    except asyncio.CancelledError as cancelled:
        raise typer.Exit(128 + signal.SIGINT) from cancelled
    print_result(report, as_json=as_json)


async def _run(config: Config, *, images: Path, seed: str, machine_count: int, duration_s: float) -> SoakReport:
    """Run a soak. SIGTERM or Ctrl-C ends it early, with a report; a second signal cancels it.

    Raises:
        CancelledError: After a second signal; machines are destroyed properly nevertheless.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    soaking = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and soaking is not None:
            soaking.cancel()
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        with progress("soak") as report:
            return await soak(
                config,
                images=images,
                seed=seed,
                machine_count=machine_count,
                duration_s=duration_s,
                stop=stop,
                report=report,
            )
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


if __name__ == "__main__":
    typer.run(soak_command)
