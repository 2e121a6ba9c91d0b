"""Read OSWorld's task files from a checkout."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.downloads import asset_urls
from envd.tasks.formats.entries import Problem

#: Directories of a checkout's `evaluation_examples`, their suites, and their guests' operating systems.
_DIRECTORIES = (("examples", "osworld", GuestOs.LINUX), ("examples_windows", "osworld-windows", GuestOs.WINDOWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class OsworldFile:
    """One task file."""

    suite: str
    """`osworld` or `osworld-windows`: both systems use some ids."""
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
        """Its metrics and getters."""
        evaluator: Mapping[str, Any] = self.content["evaluator"]
        return evaluator

    @property
    def is_infeasible(self) -> bool:
        """Whether the task cannot be done."""
        return self.evaluator.get("func") == "infeasible"


def read_files(directory: Path) -> tuple[list[OsworldFile], list[Problem]]:
    """Return every task file below an `evaluation_examples`, by suite, domain and name, and the files that are none.

    Users add files of their own, of which one must not cost the others.
    """
    found: list[OsworldFile] = []
    problems: list[Problem] = []
    for name, suite, system in _DIRECTORIES:
        for path in sorted((directory / name).glob("*/*.json")):
            try:
                content = json.loads(path.read_bytes())
                file = OsworldFile(suite=suite, domain=path.parent.name, os=system, path=path, content=content)
                _require_shape(file)
                asset_urls(file.setup, file.evaluator)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                fault = f"{error} is missing" if isinstance(error, KeyError) else error
                message = f"not an OSWorld task file: {fault}"
                problems.append(Problem(where=str(path), task_id=f"{suite}/{path.stem}", message=message))
            else:
                found.append(file)
    return found, problems


def _require_shape(file: OsworldFile) -> None:
    """Raise ValueError, TypeError or KeyError if a required part is missing or has the wrong type."""
    if not isinstance(file.content, dict) or not isinstance(file.content["evaluator"], dict):
        raise TypeError("the file, and evaluator in it, must be objects")
    if not isinstance(file.content["id"], str) or not isinstance(file.content["instruction"], str):
        raise TypeError("id and instruction must be text")
    func = file.evaluator["func"]
    if not isinstance(func, str | list):
        raise TypeError("evaluator.func must be text or a list")
    for step in (*file.setup, *(file.evaluator.get("postconfig") or ())):
        if not isinstance(step, dict) or not isinstance(step["type"], str) or not isinstance(step["parameters"], dict):
            raise TypeError("a step must be an object with a type (text) and parameters (an object)")
