"""Registers the verb, the checker and the loader of CUA-Gym's bundles."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envd.base.config_values import CUA_GYM
from envd.integrations.cua_gym.bundle import CuaGymCheck, CuaGymSetup
from envd.tasks.systems import TaskSystem


def _read(directory: Path) -> Iterator[Any]:
    # Readers make tasks, which have the checkers of all systems.
    from envd.integrations.cua_gym.reader import read_bundles  # noqa: PLC0415

    return read_bundles(directory)


SYSTEM = TaskSystem(verb=CuaGymSetup, checker=CuaGymCheck, suite=CUA_GYM, read_directory=_read)
