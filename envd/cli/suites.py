"""Which tasks a configuration serves."""

import importlib.resources
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envd.config import Config
from envd.osworld.catalogue import osworld_tasks
from envd.osworld.environment import Environment
from envd.tasks.catalogue import TaskCatalogue, TaskFile, read_all
from envd.tasks.formats.entries import Found


def load_tasks(config: Config) -> TaskCatalogue:
    """Load the built-in suite, the files that `config` adds, and OSWorld's if they are registered.

    Raises:
        ConfigError: A file is wrong.
        OsworldError: One of OSWorld's is.
    """
    with _sources(config) as (files, include_builtin):
        catalogue = TaskCatalogue.load(files, include_builtin=include_builtin)
    directory = Environment(config.cache_dir).tasks
    if directory is None or config.hypervisor_uri == "fake":
        return catalogue
    return TaskCatalogue([*catalogue.list(), *osworld_tasks(directory)])


def look_at_tasks(config: Config) -> Found:
    """Yield all tasks of the built-in suite and of the files that `config` adds, and all that is wrong in them."""
    with _sources(config) as (files, include_builtin):
        yield from read_all(files, include_builtin=include_builtin)


@contextmanager
def _sources(config: Config) -> Iterator[tuple[list[TaskFile], bool]]:
    """Yield the files to read, and whether to read the built-in suite before them.

    The fake's drawn desktop has none of the programs that the built-in tasks are about, so it has a suite of its own.
    """
    files = [_task_file(each) for each in config.tasks.suites]
    if config.hypervisor_uri != "fake":
        yield files, True
        return
    with importlib.resources.as_file(importlib.resources.files("envd") / "testing" / "suites" / "fake.yaml") as suite:
        yield [TaskFile(Path(suite)), *files], False


def _task_file(setting: str) -> TaskFile:
    """Return what `PATH` or `SUITE=PATH` means; the path is absolute."""
    suite, _, path = setting.partition("=") if not setting.startswith("/") else ("", "", setting)
    return TaskFile(Path(path), suite=suite) if suite else TaskFile(Path(path))
