"""The files that OSWorld's code would download, by its task files."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


def getter_configs(evaluator: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the getters that an evaluator has under `result` or `expected`: none, one or several."""
    value = evaluator.get(key)
    for part in value if isinstance(value, list | tuple) else (value,):
        if part:
            yield part


def asset_urls(steps: Sequence[Mapping[str, Any]], evaluator: Mapping[str, Any]) -> dict[str, str]:
    """Return the URLs that OSWorld would download, by the file names that it first looks for in its cache directory.

    The names are those of its SetupController (`{uuid5(URL namespace, url)}_{basename(path)}`) and of its `cloud_file`
    getter (`dest`).

    Raises:
        KeyError, TypeError, ValueError: A step or getter is malformed, or a name leads out of the directory.
    """
    found: dict[str, str] = {}
    for step in (*steps, *(evaluator.get("postconfig") or ())):
        if step["type"] == "download":
            for file in step["parameters"].get("files", ()):
                name = PurePosixPath(file["path"]).name
                found[f"{uuid.uuid5(uuid.NAMESPACE_URL, file['url'])}_{name}"] = file["url"]
    for key in ("result", "expected"):
        for getter in getter_configs(evaluator, key):
            if getter.get("type") == "cloud_file":
                several = isinstance(getter["path"], list | tuple)
                urls, names = (getter["path"], getter["dest"]) if several else ([getter["path"]], [getter["dest"]])
                found.update(zip(names, urls, strict=False))
    return {_relative(name): url for name, url in found.items()}


def _relative(name: str) -> str:
    """Return a file name that stays below its directory. Raises: ValueError."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or PureWindowsPath(name).drive:
        raise ValueError(f"{name!r} is not a file name below a directory")
    return name
