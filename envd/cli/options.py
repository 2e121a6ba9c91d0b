"""Options that several commands share, and the `Config` that they load."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from envd.base.config import Config, Raw, load, parse_pool_flags
from envd.base.telemetry import logs
from envd.hypervisor.backends import backend_of

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", envvar="ENVD_CONFIG", help="TOML file with settings.")
]
StateDir = Annotated[Path | None, typer.Option("--state-dir", metavar="DIR", help="State directory of the daemon.")]
CacheDir = Annotated[Path | None, typer.Option("--cache-dir", metavar="DIR", help="Image cache; daemons may share it.")]
Hypervisor = Annotated[
    str | None,
    typer.Option("--hypervisor", metavar="URI", help="Hypervisor: qemu:///embed?root=/DIR, qemu:///system or fake."),
]
Accelerator = Annotated[str | None, typer.Option("--accelerator", help="Accelerator: auto, kvm or tcg.")]
TaskFiles = Annotated[
    list[str] | None,
    typer.Option("--tasks", metavar="[SUITE=]PATH", help="Task file, or directory of task files; repeatable."),
]

#: Options for the configuration, by parameter of `load_config`.
_CONFIG_OPTIONS: Mapping[str, Any] = {
    "tasks": TaskFiles,
    "state_dir": StateDir,
    "cache_dir": CacheDir,
    "config": ConfigFile,
    "hypervisor": Hypervisor,
    "accelerator": Accelerator,
}


def load_config(
    config: Path | None = None,
    *,
    pools: list[str] | None = None,
    listen: str | None = None,
    metrics_listen: str | None = None,
    console_listen: str | None = None,
    compat: list[str] | None = None,
    state_dir: Path | None = None,
    cache_dir: Path | None = None,
    hypervisor: str | None = None,
    accelerator: str | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
    tasks: list[str] | None = None,
    shards: int | None = None,
) -> Config:
    """Load the configuration from its file, the environment and a command's flags. Raises: ConfigError."""
    flags: Raw = {
        "listen": listen,
        "metrics_listen": metrics_listen,
        "console_listen": console_listen,
        "compat": ",".join(compat) if compat else None,
        "state_dir": state_dir,
        "cache_dir": cache_dir,
        "hypervisor.uri": hypervisor,
        "hypervisor.accelerator": accelerator,
        "log_format": log_format,
        "log_level": log_level,
        "tasks.suites": tasks or None,
        "shards": shards,
        "pools": parse_pool_flags(pools) if pools else None,
    }
    return load(file=config, environ=os.environ, flags=flags, check_uri=backend_of)


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for commands that take a `Config` as their only positional argument.

    On the command line they have `--config` and these options instead.

    Args:
        names: Parameters of `load_config`.
    """
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _CONFIG_OPTIONS.items()
        if name in (*names, "config")
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            settings = load_config(**{parameter.name: arguments.pop(parameter.name) for parameter in shared})
            command(settings, **arguments)

        own = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
        # A stable sort: `as_json` is last.
        parameters = sorted([*own, *shared], key=lambda parameter: parameter.name == "as_json")
        # typer reads both.
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def runs_own_daemon(*names: str, log_level: str = "warning") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator like `with_settings` for commands that start a daemon of their own; it also sets up logging.

    Args:
        names: Parameters of `load_config`, besides those of every daemon.
        log_level: Replaces the default level `info`, whose records would disturb the command's output and timing.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(settings: Config, **arguments: Any) -> None:
            level = log_level if settings.log_level == "info" else settings.log_level
            logs.setup(log_format=settings.log_format, level=level)
            command(settings, **arguments)

        return with_settings("state_dir", "cache_dir", "hypervisor", "accelerator", *names)(wrapper)

    return decorate
