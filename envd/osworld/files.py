"""OSWorld's task files: where they lie in a checkout, and which of their parts matter to us. Only reads them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
