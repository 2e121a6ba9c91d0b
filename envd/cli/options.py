"""The options of commands that set a `Config`."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from envd.base.config import Config
from envd.base.config_sources import load, parse_pool_flags
from envd.base.config_values import COMPAT_PORTS
from envd.base.errors import ConfigError
from envd.base.telemetry import logs
from envd.base.terminal import reports_errors
from envd.hypervisor.backends import backend_of

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_CONFIG = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", envvar="ENVD_CONFIG", help="TOML file with settings.")
]


def _option(
    key: str, kind: Any, option_help: str, metavar: str | None = None, names: tuple[str, ...] = ()
) -> tuple[str, Any]:
    """Return the key of a setting and its option, which shows the setting's default; `names` if not the parameter's."""
    value: object = None if "*" in key else functools.reduce(getattr, key.split("."), Config())
    default = str(value) if isinstance(value, str | Path) and value else False
    return key, Annotated[kind | None, typer.Option(*names, metavar=metavar, help=option_help, show_default=default)]


#: The key of the setting and the option, by parameter.
_OPTIONS: Mapping[str, tuple[str, Any]] = {
    "pool": _option("pools", list[str], "Keep N machines of IMAGE ready; repeatable.", "N|IMAGE=N"),
    "tasks": _option("tasks.suites", list[str], "Task file, or directory of task files; repeatable.", "[SUITE=]PATH"),
    "web": _option("pools.*.web", str, "What guests of every pool reach: closed, allow, record or replay."),
    # Before the console's recordings of episodes, its name was --recording.
    "recording": _option(
        "pools.*.recording",
        str,
        "Recording of web pages to record into or to replay.",
        "NAME",
        names=("--web-recording", "--recording"),
    ),
    "listen": _option("listen", str, "Address of the gRPC service.", "HOST:PORT"),
    "metrics_listen": _option("metrics_listen", str, "Address of the metrics.", "HOST:PORT"),
    "console_listen": _option(
        "console_listen", str, "Address of the console, a web page; `envd serve` has none without it.", "HOST:PORT"
    ),
    "compat": _option(
        "compat",
        list[str],
        f"Also serve protocols of other systems: {', '.join(COMPAT_PORTS)}; repeatable.",
        "NAME[=HOST:PORT],...",
    ),
    "state_dir": _option("state_dir", Path, "State directory of the daemon.", "DIR"),
    "cache_dir": _option("cache_dir", Path, "Image cache; daemons may share it.", "DIR"),
    "hypervisor": _option(
        "hypervisor.uri", str, "Hypervisor: qemu:///embed?root=/DIR, qemu:///system, oci: or fake.", "URI"
    ),
    "accelerator": _option("hypervisor.accelerator", str, "Accelerator: auto, kvm or tcg."),
    "log_format": _option("log_format", str, "Log format: text or json."),
    "log_level": _option("log_level", str, "Log level: debug, info, warning or error."),
}
_DRAWN_HYPERVISOR = Annotated[str, typer.Option(metavar="URI", hidden=True)]
#: All options, of `envd serve`.
EVERY_SETTING = tuple(_OPTIONS)


def load_config(config: Path | None, given: Mapping[str, Any]) -> Config:
    """Load the configuration from its file, the environment and a command's options, by parameter.

    Raises:
        ConfigError: A value is invalid.
    """
    flags = {_OPTIONS[name][0]: None if value == [] else value for name, value in given.items()}
    if pools := flags.get("pools"):
        flags["pools"] = parse_pool_flags(pools)
    if compat := flags.get("compat"):
        flags["compat"] = ",".join(compat)
    loaded = partial(load, file=config, environ=os.environ, check_uri=backend_of)
    of_pools = {key: value for key, value in flags.items() if ".*." in key and value is not None}
    flags = {key: value for key, value in flags.items() if ".*." not in key}
    if of_pools:
        names = loaded(flags=flags).pools
        flags |= {key.replace("*", name): value for name in names for key, value in of_pools.items()}
    return loaded(flags=flags)


def with_settings(*names: str) -> Decorator:
    """Return a decorator for commands that take a `Config` as their only positional argument; it reports errors.

    On the command line they have `--config` and these options instead.
    """
    annotations = {**{name: _OPTIONS[name][1] for name in names}, "config": _CONFIG}
    options = with_options(annotations, lambda given: load_config(given.pop("config"), given))
    return lambda command: reports_errors(options(command))


def with_options(annotations: Mapping[str, Any], join: Callable[[dict[str, Any]], object]) -> Decorator:
    """Return a decorator for commands whose only positional argument is made of several options."""
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            command(join({name: arguments.pop(name) for name in annotations}), **arguments)

        own = [p for p in inspect.signature(command).parameters.values() if p.kind is p.KEYWORD_ONLY]
        # A stable sort: `as_json` is last.
        parameters = sorted([*own, *shared], key=lambda parameter: parameter.name == "as_json")
        # typer reads both.
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def runs_own_daemon(*names: str, log_level: str = "warning", is_drawn: bool = False) -> Decorator:
    """Return a decorator like `with_settings` for commands that start a daemon of their own; it also sets up logging.

    Args:
        log_level: Replaces the default level `info`, whose records would disturb the command's output and timing.
        is_drawn: Whether it always serves drawn desktops, so that no other hypervisor can be chosen.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(settings: Config, *, hypervisor: str = "fake", **arguments: Any) -> None:
            if hypervisor != "fake":
                raise ConfigError(f"--hypervisor {hypervisor}: this command draws its desktops; leave it out")
            level = log_level if settings.log_level == "info" else settings.log_level
            logs.setup(log_format=settings.log_format, level=level)
            command(settings, **arguments)

        if is_drawn:
            # As for other commands with drawn desktops.
            own = inspect.signature(command)
            option = inspect.Parameter(
                "hypervisor", inspect.Parameter.KEYWORD_ONLY, default="fake", annotation=_DRAWN_HYPERVISOR
            )
            wrapper.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
        hypervisor = () if is_drawn else ("hypervisor", "accelerator")
        return with_settings("state_dir", "cache_dir", *hypervisor, *names)(wrapper)

    return decorate
