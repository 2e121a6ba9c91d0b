"""OSWorld tasks as data: the bridge that runs OSWorld's code, and the files that its code would download."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import JsonValue

from envd.hypervisor.machine import GuestOs
from envd.tasks.text import CheckOutcome

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.desktop.desktop import Desktop

#: A setup step or an evaluator, in OSWorld's form.
OsworldObject = Mapping[str, JsonValue]

NOT_INSTALLED = "OSWorld is not installed on this host; run `envd osworld install` and restart the daemon"


class OsworldBridge(Protocol):
    """Runs OSWorld's setup and evaluators."""

    async def set_up(
        self, desktop: "Desktop", steps: Sequence[OsworldObject], *, os: GuestOs, on_step: Callable[[str], None]
    ) -> None:
        """Perform setup steps; call `on_step` with the name of each as it starts. Raises: GuestError, MachineLost."""

    async def evaluate(self, desktop: "Desktop", evaluator: OsworldObject, *, os: GuestOs) -> CheckOutcome:
        """Score the guest's current state. Raises: GuestError, MachineLost."""


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
