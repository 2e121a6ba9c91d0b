"""Read the operator's settings once at start, from a TOML file, the environment and the command line.

Later sources win, key by key: the models' defaults, the file, `ENVD_...` variables (`__` between levels, so
`ENVD_LIMITS__MAX_STEPS`), then flags. Every error names the source, the key and, if there is one, a similar valid key.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from cuaenv.problems import did_you_mean, problem_of, without_path
from envd.base.config import DEFAULT_IMAGE, MAX_MACHINES, Config, PoolConfig, RunShare
from envd.base.errors import ConfigError

ENV_PREFIX = "ENVD_"

#: Flags whose name differs from the last part of their key.
_FLAGS = {"hypervisor.uri": "--hypervisor", "pools": "--pool", "tasks.suites": "--tasks"}

#: Values of TOML, the environment or flags, before validation.
Raw = dict[str, Any]

#: Sections that may occur many times, each under a name of the operator's choice.
_NAMED: Mapping[str, type[BaseModel]] = {"pools": PoolConfig, "limits.runs": RunShare}


def parse_pool_flags(specs: Sequence[str]) -> Raw:
    """Read `--pool` flags: `N` machines of the default image, or `IMAGE=N`.

    Raises:
        ConfigError: A flag is malformed, or two name the same pool.
    """
    pools: Raw = {}
    for spec in specs:
        match = re.fullmatch(r"(?:([^=]+)=)?(\d+)", spec)
        if match is None:
            raise ConfigError(f"--pool {spec}: expected N or IMAGE=N, such as --pool 2 or --pool {DEFAULT_IMAGE}=2")
        name = match[1] or DEFAULT_IMAGE
        if name in pools:
            raise ConfigError(f"--pool {spec}: pool {name!r} is given twice; name each pool once")
        if not 1 <= (size := int(match[2])) <= MAX_MACHINES:
            raise ConfigError(f"--pool {spec}: must have at least 1 and at most {MAX_MACHINES} machines")
        pools[name] = {"size": size}
    return pools


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    check_uri: Callable[[str], object] = str,
) -> Config:
    """Merge the sources and validate the result.

    Args:
        flags: Values by dotted key (`limits.max_steps`); None values are ignored.
        check_uri: Raises ValueError if no backend supports a value of `hypervisor.uri`.

    Raises:
        ConfigError: A source cannot be read, or has an unknown key or an invalid value.
    """
    merged: Raw = {}
    origin: dict[tuple[str, ...], str] = {}
    if file is not None:
        _merge(merged, origin, _read_toml(file), str(file))
    for variable, path, value in _environment(environ or {}):
        _merge(merged, origin, _nested(path, value), variable)
    for key, given in (flags or {}).items():
        if given is not None:
            flag = _FLAGS.get(key) or "--" + key.rpartition(".")[2].replace("_", "-")
            _merge(merged, origin, _nested(tuple(key.split(".")), given), flag)
    try:
        return Config.model_validate(merged, context={"check_uri": check_uri})
    except ValidationError as error:
        raise ConfigError("; ".join(_messages(error, origin))) from error


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting; pools appear as `pools.NAME`, runs as `limits.runs.NAME`."""
    for name, info in model.model_fields.items():
        section = _NAMED.get(f"{prefix}{name}", info.annotation)
        path = f"{prefix}{name}.NAME" if f"{prefix}{name}" in _NAMED else f"{prefix}{name}"
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from fields(section, f"{path}.")
        else:
            yield path


def _read_toml(file: Path) -> Raw:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {without_path(error)}; check --config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}; correct that line") from error


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield (variable, path, value) of our variables, and refuse likely misspellings.

    Variables without a similar setting are ignored: Kubernetes, for example, sets `ENVD_SERVICE_HOST` in every
    container next to a service called envd.
    """
    names = {path.upper().replace(".", "__"): path for path in fields() if ".NAME." not in path}
    named = tuple(f"{section.upper().replace('.', '__')}__" for section in _NAMED)
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX)
        if name in names:
            yield variable, tuple(names[name].split(".")), environ[variable]
        elif name.startswith(named):
            yield variable, tuple(name.lower().split("__")), environ[variable]
        elif match := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
            raise ConfigError(f"{variable}: unknown setting; did you mean {ENV_PREFIX}{match[0]}?")


def _nested(path: tuple[str, ...], value: object) -> Raw:
    for part in reversed(path):
        value = {part: value}
    return cast(Raw, value)


def _merge(into: Raw, origin: dict[tuple[str, ...], str], values: Raw, source: str, at: tuple[str, ...] = ()) -> None:
    for key, value in values.items():
        path = (*at, key)
        if isinstance(value, dict):
            origin.setdefault(path, source)
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], origin, value, source, path)
        else:
            into[key], origin[path] = value, source


def _messages(error: ValidationError, origin: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # the setting that the default depends on has an error of its own
        path = tuple(str(part) for part in item["loc"])
        known = [path[:end] for end in range(len(path), 0, -1) if path[:end] in origin]
        source = origin[known[0]] if known else "configuration"
        key = ".".join(path)
        if item["type"] == "extra_forbidden":
            text = "unknown key" + did_you_mean(path[-1], _siblings(path))
        else:
            text = problem_of(item)
        yield f"{source}: {key}: {text}" if key else f"{source}: {text}"


def _siblings(path: tuple[str, ...]) -> list[str]:
    """Return the valid keys at the end of `path`."""
    shape = tuple("NAME" if ".".join(path[:at]) in _NAMED else part for at, part in enumerate(path[:-1]))
    keys = [tuple(key.split(".")) for key in fields()]
    return sorted({key[len(shape)] for key in keys if key[: len(shape)] == shape and len(key) > len(shape)})
