"""OSWorld's task files: where they lie in a checkout, and which of their parts matter to us. Only reads them."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from envd.errors import OsworldError
from envd.hypervisor.machine import GuestOs

#: Directories of a checkout's `evaluation_examples`, the suites that they become, and what their guests run.
_DIRECTORIES = (
    ("examples", "osworld", GuestOs.LINUX),
    ("examples_windows", "osworld-windows", GuestOs.WINDOWS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OsworldFile:
    """One task file."""

    suite: str
    """`osworld`, or `osworld-windows`: ids are used twice, once for each system."""
    domain: str
    """Its directory, such as `vs_code`."""
    os: GuestOs
    path: Path
    content: Mapping[str, Any]

    @property
    def task_id(self) -> str:
        """`{suite}/{id}`."""
        return f"{self.suite}/{self.content['id']}"

    @property
    def setup(self) -> Sequence[Mapping[str, Any]]:
        """Setup steps, in OSWorld's form."""
        return self.content.get("config") or ()

    @property
    def evaluator(self) -> Mapping[str, Any]:
        """What scores it."""
        evaluator: Mapping[str, Any] = self.content["evaluator"]
        return evaluator

    @property
    def is_infeasible(self) -> bool:
        """Whether no one can do it."""
        return self.evaluator.get("func") == "infeasible"


def read_files(directory: Path) -> list[OsworldFile]:
    """Return every task file below an `evaluation_examples`, by suite, domain and name.

    Raises:
        OsworldError: One is no task; names it.
    """
    found: list[OsworldFile] = []
    for name, suite, system in _DIRECTORIES:
        for path in sorted((directory / name).glob("*/*.json")):
            try:
                content = json.loads(path.read_bytes())
                file = OsworldFile(suite=suite, domain=path.parent.name, os=system, path=path, content=content)
                _require_shape(file)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise OsworldError(f"{path} is no task file of OSWorld's: {error!r}") from error
            found.append(file)
    return found


def _require_shape(file: OsworldFile) -> None:
    """Raise ValueError, TypeError or KeyError where a part that is relied on is missing or of another type."""
    if not isinstance(file.content["id"], str) or not isinstance(file.content["instruction"], str):
        raise TypeError("id and instruction are texts")
    func = file.evaluator["func"]
    if not isinstance(func, str | list):
        raise TypeError("evaluator.func is a text or a list")
    for step in (*file.setup, *(file.evaluator.get("postconfig") or ())):
        if not isinstance(step["type"], str) or not isinstance(step["parameters"], dict):
            raise TypeError("a step has a type and parameters")


def measured(evaluator: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """Yield what an evaluator gets under `result` or `expected`: one, several or none."""
    value = evaluator.get(key)
    for part in value if isinstance(value, list | tuple) else (value,):
        if part:
            yield part


def asset_urls(steps: Sequence[Mapping[str, Any]], evaluator: Mapping[str, Any]) -> dict[str, str]:
    """Return what OSWorld would download, by the file names in its cache directory under which it looks first.

    The names are those of its SetupController (`{uuid5(URL namespace, url)}_{basename(path)}`) and of its `cloud_file`
    getter (`dest`).
    """
    found: dict[str, str] = {}
    for step in (*steps, *(evaluator.get("postconfig") or ())):
        if step["type"] == "download":
            for file in step["parameters"].get("files", ()):
                name = PurePosixPath(file["path"]).name
                found[f"{uuid.uuid5(uuid.NAMESPACE_URL, file['url'])}_{name}"] = file["url"]
    for key in ("result", "expected"):
        for part in measured(evaluator, key):
            if part.get("type") == "cloud_file":
                several = isinstance(part["path"], list | tuple)
                urls, names = (part["path"], part["dest"]) if several else ([part["path"]], [part["dest"]])
                found.update(zip(names, urls, strict=False))
    return {_inside(name): url for name, url in found.items()}


def _inside(name: str) -> str:
    """Return a file name that leads nowhere else."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or PureWindowsPath(name).drive:
        raise OsworldError(f"{name!r} is no name of a file below a directory")
    return name
