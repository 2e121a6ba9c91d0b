"""Foreign suites of tasks: what each adds to the task model. Each is a package that may be absent."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from envd.hypervisor.machine import GuestOs

if TYPE_CHECKING:
    from envd.tasks.checkers.base import LeafChecker
    from envd.tasks.verb_base import SetupBase

#: Packages with a module `system` that has a `SYSTEM`, in the order of their kinds in messages.
_PACKAGES: Final = ("envd.integrations.osworld", "envd.integrations.cua_gym", "envd.integrations.open_computer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSystem:
    """What a foreign suite adds."""

    verb: "type[SetupBase]"
    checker: "type[LeafChecker]"
    suite: str = ""
    """Suite of the tasks of `read_directory`, and the prefix of its directories in `tasks.suites`."""
    read_directory: Callable[[Path], Iterator[Any]] | None = None
    """Yields the tasks and the problems of a directory; its verb and its checker are for this loader alone."""
    read_task: Callable[[Mapping[str, object], GuestOs | None], dict[str, object]] | None = None
    """Returns the fields of a task that rows and task files have in the suite's form."""


def packages() -> tuple[str, ...]:
    """Return the packages that are present."""
    return tuple(package for package in _PACKAGES if find_spec(package))


@cache
def task_systems() -> tuple[TaskSystem, ...]:
    """Return the systems whose packages are present."""
    return tuple(import_module(f"{package}.system").SYSTEM for package in packages())


@cache
def kinds_of_loaders() -> frozenset[str]:
    """Return the kinds of verbs and checkers that name directories of the host: no task file may have them."""
    return frozenset(
        get_args(part.model_fields["kind"].annotation)[0]
        for system in task_systems()
        if system.read_directory
        for part in (system.verb, system.checker)
    )
