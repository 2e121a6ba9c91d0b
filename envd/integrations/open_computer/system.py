"""Registers the verb, the checker and the loader of OpenComputer's tasks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envd.base.config_values import OPENCOMPUTER
from envd.integrations.open_computer.verifiers import OpenComputerCheck, OpenComputerSetup
from envd.tasks.systems import TaskSystem


def _read(directory: Path) -> Iterator[Any]:
    # Readers make tasks, which have the checkers of all systems.
    from envd.integrations.open_computer.reader import read_repository  # noqa: PLC0415

    return read_repository(directory)


SYSTEM = TaskSystem(verb=OpenComputerSetup, checker=OpenComputerCheck, suite=OPENCOMPUTER, read_directory=_read)
