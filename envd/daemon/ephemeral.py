"""A private daemon in the process of `envd demo`, `envd bench` and others: its settings, image and signals."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer
import uvloop

from cuaenv.cli.terminal import progress
from envd.base.config import DEFAULT_IMAGE, Config, PoolConfig, RecordingConfig, SecurityConfig
from envd.base.terminal import stop_on_sigterm
from envd.daemon.process import prepare_process
from envd.hypervisor.backends import backend_of
from envd.images.build import build_image
from envd.images.catalogue import ImageCatalogue
from envd.images.recipe import desktop_recipe

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def ephemeral_config(settings: Config, *, name: str, pool: dict[str, Any], image: str = "") -> Config:
    """Return settings for a daemon with one pool, free ports, and a state directory of its own.

    Args:
        name: Name of the directory below the operator's state directory.
        image: Of the machines, with the settings of the operator's first pool of it; empty for the default image, with
            the settings of the pool of that name.
    """
    own_pool = settings.pools.get(DEFAULT_IMAGE, PoolConfig(image=DEFAULT_IMAGE))
    if image:
        configured = next((each for each in settings.pools.values() if each.image == image), None)
        own_pool = configured or own_pool.model_copy(update={"image": image})
    # Validated again, because defaults depend on other settings.
    own_pool = PoolConfig(**(own_pool.model_dump(exclude_unset=True) | pool))
    # The root of an embedded driver allows one daemon at a time. The templates are shared, so that only the first
    # command or daemon waits for a boot.
    uri = backend_of(settings.hypervisor.uri).private_uri(settings.hypervisor.uri)
    return settings.model_copy(
        update={
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "console_listen": "",
            "compat": (),
            "recording": RecordingConfig(),
            # The command has no token, and must not be rate-limited.
            "security": SecurityConfig(calls_per_second=0),
            "state_dir": settings.state_dir / name,
            "hypervisor": settings.hypervisor.model_copy(update={"uri": uri, "template_dir": settings.template_dir}),
            "pools": {DEFAULT_IMAGE: own_pool},
        }
    )


def ensure_image(settings: Config) -> None:
    if not backend_of(settings.hypervisor.uri).capabilities.needs_images:
        return
    stop_on_sigterm()
    with progress(f"image {DEFAULT_IMAGE}") as report:
        build_image(desktop_recipe(), ImageCatalogue(settings.cache_dir), progress=report)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work; SIGTERM or Ctrl-C cancels it, and then the process exits with the signal's status."""
    received: list[int] = []

    async def cancel_on_signal() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            return await task
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    prepare_process()
    try:
        return uvloop.run(cancel_on_signal())
    except asyncio.CancelledError as cancelled:
        raise typer.Exit(128 + received[0] if received else 1) from cancelled
