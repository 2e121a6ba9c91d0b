"""The task catalogue: loads and validates task files, and finds tasks and variants by id.

A task with a problem is left out and the others are served: the log and `envd tasks lint` list it, and asking for it
names the problem. A file or directory without a single task is an error.
"""

import difflib
import logging
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from envd.base.errors import ConfigError, TaskNotFound
from envd.tasks.formats.entries import Found, Problem
from envd.tasks.formats.files import DEFAULT_SUITE, files_in, read_tasks
from envd.tasks.model import Offer, Task, needs_obstacle
from envd.tasks.suites.desktop import DESKTOP
from envd.tasks.templates import Templates

logger = logging.getLogger(__name__)

#: Most problems in one message; `envd tasks lint` reports all.
_MAX_PROBLEMS = 10
#: Bounds on the search for similar ids, which clients cause: it takes at most about 1 ms.
_MAX_COMPARED_IDS = 16
_MAX_COMPARED_CHARS = 64
#: Those of the fake hypervisor.
_DRAWN_SUITES = frozenset({"drawn", "fake"})


FindObstacles = Callable[[str], tuple[str, ...] | None]
"""Returns why the task with an id cannot run on this host; None if that is unknown."""


def _unknown_obstacles(task_id: str) -> None:
    """Return None for every task."""


class TaskFile(NamedTuple):
    """A task file, or a directory of task files."""

    path: Path
    suite: str = DEFAULT_SUITE
    """Suite of the tasks whose format has no suites."""
    read: Callable[[Path], Found] | None = None
    """Reads a directory of another format; None for task files."""


class TaskCatalogue:
    """All tasks that a daemon serves. Immutable."""

    def __init__(
        self,
        tasks: Iterable[Task | Problem],
        *,
        templates: Templates | None = None,
        hidden: Iterable[Task] = (),
        find_obstacles: FindObstacles = _unknown_obstacles,
        offers: Iterable[Offer] = (),
    ) -> None:
        """Index tasks.

        Args:
            tasks: The listed tasks, and the problems of those that are left out.
            templates: Templates whose variants are found by id.
            hidden: Tasks that are found by their exact id only.
            find_obstacles: Finds the reasons why a task cannot run on this host.
            offers: The images that tasks may run on, to compare with their needs.

        Raises:
            ConfigError: Two tasks have the same id.
        """
        self._templates = templates
        self._find_obstacles = find_obstacles
        self._offers = tuple(offers)
        self._tasks: dict[str, Task] = {}
        self.problems: list[Problem] = []
        """What is wrong with the tasks that are left out."""
        for task in tasks:
            if isinstance(task, Problem):
                self.problems.append(task)
                continue
            if task.task_id in self._tasks:
                raise ConfigError(f"task {task.task_id}: duplicate id; rename one of them")
            self._tasks[task.task_id] = task
        self._hidden = {task.task_id: task for task in hidden}
        self._sorted_ids = sorted(self._tasks)

    @classmethod
    def load(
        cls,
        sources: Iterable[TaskFile | Path] = (),
        *,
        include_builtin: bool = True,
        templates: Templates | None = None,
    ) -> "TaskCatalogue":
        """Load task files, and all task files in directories, after the built-in suites.

        Args:
            include_builtin: Whether to load the suite for the desktop image.
            templates: The templates to load; None for those of the built-in suite, if it is loaded.

        Raises:
            ConfigError: A file or directory has problems and no task; names the file, line, task and field.
        """
        templates = templates or (DESKTOP if include_builtin else None)
        found: list[Task | Problem] = []
        for source, each in groupby(
            _read_sources(sources, include_builtin=include_builtin, templates=templates), key=itemgetter(0)
        ):
            part = [task for _, task in each]
            problems = [task for task in part if isinstance(task, Problem)]
            if len(problems) == len(part):
                raise ConfigError("\n".join(_lines(problems)))
            for line in _lines(problems):
                logger.warning("%s: a task is left out: %s", source, line)
            found += part
        return cls(found, templates=templates)

    def with_tasks(
        self,
        more: Iterable[Task | Problem],
        *,
        hidden: Iterable[Task] = (),
        find_obstacles: FindObstacles = _unknown_obstacles,
        offers: Iterable[Offer] = (),
    ) -> "TaskCatalogue":
        """Return a catalogue with additional tasks, see `__init__`. Raises: ConfigError: Two tasks have the same id."""
        return TaskCatalogue(
            [*self._tasks.values(), *self.problems, *more],
            templates=self._templates,
            hidden=hidden,
            find_obstacles=find_obstacles,
            offers=offers,
        )

    def find(self, task_id: str) -> Task | None:
        """Return a task, or a variant of one: `desktop/delete-line?seed=17`; None if it does not exist."""
        task = self._tasks.get(task_id) or self._hidden.get(task_id)
        if task is None and self._templates is not None:
            with suppress(TaskNotFound):
                task = self._templates.variant(task_id)
        return task

    def get(self, task_id: str) -> Task:
        """Return a task, as `find` does.

        Raises:
            TaskNotFound: It does not exist; the message names similar ids.
        """
        task = self._tasks.get(task_id) or self._hidden.get(task_id)
        if task is None and self._templates is not None:
            task = self._templates.variant(task_id)
        if task is None:
            if (problem := next((each for each in self.problems if each.task_id == task_id), None)) is not None:
                detail = ": ".join(filter(None, (problem.field, problem.message)))
                raise TaskNotFound(f"task {task_id!r} is left out: {detail}; run `envd tasks lint` on the host")
            close = self._similar(task_id)
            suites = ", ".join(self._suite_names()) or "none"
            loaded = f"the suites loaded here are {suites}; load others by --tasks"
            hint = f"did you mean {', '.join(close)}?" if close else loaded
            if task_id.partition("/")[0] in _DRAWN_SUITES - set(self._suite_names()):
                hint = "it is played on drawn desktops; use --hypervisor fake"
            what = "suite" if task_id.endswith("/") else "task"
            raise TaskNotFound(f"{what} {task_id.removesuffix('/')!r} not found; {hint}")
        return task

    def select(self, names: Iterable[str]) -> tuple[Task, ...]:
        """Return tasks by id, and all tasks of a suite by `SUITE/`, each once.

        Raises:
            TaskNotFound: A name matches no task and no suite.
        """
        chosen: dict[str, Task] = {}
        for name in names:
            of_suite = [task for task in self.list() if name.endswith("/") and task.task_id.startswith(name)]
            chosen |= {task.task_id: task for task in of_suite or [self.get(name)]}
        return tuple(chosen.values())

    def _similar(self, task_id: str) -> "list[str]":
        """Return at most 3 similar ids among the neighbours in id order."""
        if task_id.endswith("/"):
            return difflib.get_close_matches(task_id[:-1], self._suite_names(), n=1)
        middle = bisect(self._sorted_ids, task_id)
        start = max(0, middle - _MAX_COMPARED_IDS // 2)
        candidates = self._sorted_ids[start : start + _MAX_COMPARED_IDS]
        short = [candidate for candidate in candidates if len(candidate) <= _MAX_COMPARED_CHARS]
        return difflib.get_close_matches(task_id[:_MAX_COMPARED_CHARS], short, n=3, cutoff=0.5)

    def list(self) -> tuple[Task, ...]:
        """Return all tasks in file order; of each template, its plain variant."""
        return tuple(self._tasks.values())

    def obstacles(self, task: Task) -> tuple[str, ...] | None:
        """Return why a task cannot run on this host, each reason `kind: detail`; None if that is unknown."""
        found = self._find_obstacles(task.task_id)
        unmet = needs_obstacle(task, self._offers)
        return (*(found or ()), unmet) if unmet else found

    def variant_count(self, task_id: str) -> int:
        """Return the number of variants of a task's template; 1 if the task has no template."""
        template = self._templates.by_id.get(task_id) if self._templates else None
        return template.variant_count if template else 1

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"<TaskCatalogue {len(self)} tasks in {', '.join(self._suite_names()) or 'no suites'}>"

    def _suite_names(self) -> tuple[str, ...]:
        return tuple(sorted({task_id.split("/")[0] for task_id in self._tasks}))


def read_all(
    sources: Iterable[TaskFile | Path], *, include_builtin: bool = True, templates: Templates | None = None
) -> Iterable[Task | Problem]:
    """Yield the tasks and all problems of task files, duplicate ids included, after the built-in tasks.

    The arguments are those of `TaskCatalogue.load`.
    """
    for _, found in _read_sources(sources, include_builtin=include_builtin, templates=templates):
        yield found


def _lines(problems: Sequence[Problem]) -> Iterator[str]:
    yield from map(str, problems[:_MAX_PROBLEMS])
    if len(problems) > _MAX_PROBLEMS:
        yield f"and {len(problems) - _MAX_PROBLEMS} more; see `envd tasks lint`"


def _read_sources(
    sources: Iterable[TaskFile | Path], *, include_builtin: bool, templates: Templates | None
) -> Iterator[tuple[str, Task | Problem]]:
    """Yield what `read_all` does, each with its file or directory."""
    paths: list[tuple[Traversable, str, Callable[[Path], Found] | None]] = []
    if include_builtin:
        paths.append((files("envd.tasks") / "suites", DEFAULT_SUITE, None))
    paths += [source if isinstance(source, TaskFile) else TaskFile(source) for source in sources]
    seen: dict[str, str] = {}
    templates = templates or (DESKTOP if include_builtin else None)
    for template in templates.by_id.values() if templates else ():
        seen[template.task_id] = f"the templates of {template.task_id.partition('/')[0]}"
        yield "templates", template.variant(None)
    for source, file, tasks in _read_each(paths):
        for found in tasks:
            if isinstance(found, Task) and found.task_id in seen:
                first = (
                    "twice in this file" if seen[found.task_id] == str(file) else f"already in {seen[found.task_id]}"
                )
                message = f"duplicate id, {first}; rename one of them"
                yield source, Problem(where=str(file), task_id=found.task_id, message=message)
                continue
            if isinstance(found, Task):
                seen[found.task_id] = str(file)
            yield source, found


def _read_each(
    paths: Iterable[tuple[Traversable, str, Callable[[Path], Found] | None]],
) -> Iterator[tuple[str, Traversable, Found]]:
    """Yield each file, or directory of bundles, with its source and its tasks and problems."""
    for path, suite, read in paths:
        if read is not None:
            yield str(path), path, read(Path(str(path)))
            continue
        for file in files_in(path):
            yield str(path), file, read_tasks(file, suite=suite)
