"""The options of commands that set a `Config`."""

import functools
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from envd.base.config import Config
from envd.base.config_sources import load, parse_pool_flags
from envd.base.config_values import COMPAT_PORTS
from envd.cli.command import Argument
from envd.hypervisor.backends import backend_of

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


def config_options(*names: str) -> Argument:
    """Return the argument of commands that take a `Config`: of `--config`, and of the options of these parameters."""
    options = {**{name: _OPTIONS[name][1] for name in names}, "config": _CONFIG}
    return Argument(options=options, make=lambda given: load_config(given.pop("config"), given))
