"""Which tasks a configuration serves."""

import importlib.resources
from pathlib import Path

from envd.config import Config
from envd.tasks.catalogue import TaskCatalogue


def load_tasks(config: Config) -> TaskCatalogue:
    """Load the built-in suite and those that `config` adds.

    The fake's drawn desktop has none of the programs that the built-in tasks are about, so it has a suite of its own.

    Raises:
        ConfigError: A suite is wrong.
    """
    if config.hypervisor_uri != "fake":
        return TaskCatalogue.load(config.tasks.suites)
    with importlib.resources.as_file(importlib.resources.files("envd") / "testing" / "suites" / "fake.yaml") as suite:
        return TaskCatalogue.load([Path(suite), *config.tasks.suites], include_builtin=False)
