"""Commands that start a daemon of their own in their process: their options, the image that it needs, and signals."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer
import uvloop

from cuaenv.cli.terminal import progress
from envd.base.config import DEFAULT_IMAGE, Config
from envd.base.errors import ConfigError
from envd.base.telemetry import logs
from envd.cli.command import Argument
from envd.cli.options import config_options, load_config
from envd.cli.terminal import stop_on_sigterm
from envd.daemon.process import prepare_process
from envd.hypervisor.backends import backend_of
from envd.images.build import build_image
from envd.images.catalogue import ImageCatalogue
from envd.images.recipe import desktop_recipe, for_containers, overlay_files, recipe_digest

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DRAWN_HYPERVISOR = Annotated[str | None, typer.Option(metavar="URI", hidden=True)]


def own_daemon_options(*names: str, log_level: str = "warning", is_drawn: bool = False) -> Argument:
    """Return an argument like `config_options` for commands that start a daemon of their own; it also sets up logging.

    Args:
        log_level: Replaces the default level `info`, whose records would disturb the command's output and timing.
        is_drawn: Whether it always serves drawn desktops, so that no other hypervisor can be chosen.
    """
    settings = config_options("state_dir", "cache_dir", *(() if is_drawn else ("hypervisor", "accelerator")), *names)
    # As for other commands with drawn desktops.
    options = {"hypervisor": _DRAWN_HYPERVISOR, **settings.options} if is_drawn else settings.options

    def make(given: dict[str, Any]) -> Config:
        if is_drawn and (hypervisor := given.pop("hypervisor")) not in {None, "fake"}:
            raise ConfigError(f"--hypervisor {hypervisor}: this command draws its desktops; leave it out")
        loaded = load_config(given.pop("config"), given)
        level = log_level if loaded.log_level == "info" else loaded.log_level
        logs.setup(log_format=loaded.log_format, level=level)
        return loaded

    return Argument(options=options, make=make)


def ensure_image(settings: Config) -> None:
    """Build the default image unless it exists; without root for machines that need only files. Raises: ImageError."""
    capabilities = backend_of(settings.hypervisor.uri).capabilities
    if not capabilities.needs_images:
        return
    stop_on_sigterm()
    catalogue, recipe = ImageCatalogue(settings.cache_dir), desktop_recipe()
    if capabilities.runs_files and catalogue.find(recipe.name, recipe_digest(recipe, overlay_files(recipe))) is None:
        recipe = for_containers(recipe)
    with progress(f"image {DEFAULT_IMAGE}") as report:
        build_image(recipe, catalogue, progress=report)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def with_hypervisor(settings: Config, uri: str, *, option: str) -> Config:
    """Return the settings for another hypervisor; `qemu` is the default one. Raises: ConfigError: unknown.

    Call before an event loop runs: the backend is imported, and libvirt must be by then.
    """
    own = "" if uri in {"qemu", "qemu:"} else uri
    try:
        backend_of(own)
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from error
    return settings.model_copy(update={"hypervisor": settings.hypervisor.model_copy(update={"uri": own})})


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
