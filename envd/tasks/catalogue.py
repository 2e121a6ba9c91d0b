"""Which tasks there are: reads suites from YAML files, refuses what is wrong in them, finds tasks by id.

A suite is one file: `suite`, and `tasks`, each with a `name`; a task's id is `{suite}/{name}`. Loading is all or
nothing, so a daemon never serves half a suite.
"""

import difflib
from collections.abc import Hashable, Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml
from pydantic import ValidationError

from envd.errors import ConfigError, TaskNotFound
from envd.tasks.model import Task

#: The built-in suite has some 2,000.
_MAX_PARTS = 200_000


class TaskCatalogue:
    """Every task that a daemon serves. Immutable."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Hold tasks with different ids. Raises: ConfigError."""
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            if task.task_id in self._tasks:
                raise ConfigError(f"task {task.task_id} is there twice; rename one of them")
            self._tasks[task.task_id] = task

    @classmethod
    def load(cls, paths: Iterable[Path] = (), *, include_builtin: bool = True) -> "TaskCatalogue":
        """Load suite files, and all `*.yaml` files of directories, after the suites that come with envd.

        Raises:
            ConfigError: A file cannot be read or holds something wrong; names the file, task and field.
        """
        sources: list[Traversable] = []
        if include_builtin:
            sources += _suites_in(files("envd.tasks") / "suites")
        for path in paths:
            sources += _suites_in(path) if path.is_dir() else [path]
        seen: dict[str, Traversable] = {}
        tasks: list[Task] = []
        for source in sources:
            for task in _read_suite(source):
                if task.task_id in seen:
                    raise ConfigError(f"{source}: task {task.task_id} is already in {seen[task.task_id]}; rename one")
                seen[task.task_id] = source
                tasks.append(task)
        return cls(tasks)

    def get(self, task_id: str) -> Task:
        """Return a task.

        Raises:
            TaskNotFound: No such task; the message names the closest ids.
        """
        task = self._tasks.get(task_id)
        if task is None:
            close = difflib.get_close_matches(task_id, self._tasks, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(close)}?" if close else f"; {len(self)} tasks are loaded"
            raise TaskNotFound(f"no task {task_id!r}{hint}")
        return task

    def list(self) -> tuple[Task, ...]:
        """Return all tasks, in the order of their files."""
        return tuple(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        suites = sorted({task_id.split("/")[0] for task_id in self._tasks})
        return f"<TaskCatalogue {len(self)} tasks in {', '.join(suites) or 'no suites'}>"


class _StrictLoader(yaml.SafeLoader):
    """YAML without repeated keys, of which the plain loader silently keeps the last, and without bombs of aliases."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _written_out_count(node, {}) > _MAX_PARTS:
            problem = f"written out without its aliases it has more than {_MAX_PARTS} parts, or no end"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _written_out_count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many parts a node has with every alias replaced by what it stands for; at most one above the limit."""
    if id(node) not in counts:
        # While it is being counted it has no end; so has one that holds itself.
        counts[id(node)] = _MAX_PARTS + 1
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        counts[id(node)] = min(_MAX_PARTS + 1, 1 + sum(_written_out_count(part, counts) for part in parts))
    return counts[id(node)]


def _suites_in(directory: Traversable) -> list[Traversable]:
    return sorted(
        (entry for entry in directory.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name
    )


def _read_suite(source: Traversable) -> list[Task]:
    try:
        content: object = yaml.load(source.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    # Not YAMLError alone: the loader lets through whatever Python makes of `2001-99-99`, `!!timestamp x` or "[" * 9999.
    except Exception as error:
        raise ConfigError(f"{source}: cannot be read as a suite: {error}") from error
    if not isinstance(content, dict) or set(content) != {"suite", "tasks"}:
        raise ConfigError(f"{source}: a suite has exactly the keys suite and tasks")
    suite, entries = content["suite"], content["tasks"]
    if not isinstance(suite, str) or not isinstance(entries, list):
        raise ConfigError(f"{source}: suite must be text, tasks a list")
    return [_read_task(source, suite, index, entry) for index, entry in enumerate(entries)]


def _read_task(source: Traversable, suite: str, index: int, entry: object) -> Task:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"{source}: tasks[{index}]: a task is a mapping with a name")
    fields = {key: value for key, value in entry.items() if key != "name"}
    try:
        return Task.model_validate({**fields, "task_id": f"{suite}/{entry['name']}"})
    except ValidationError as error:
        problems = "; ".join(_describe(problem["loc"], problem["msg"]) for problem in error.errors())
        raise ConfigError(f"{source}: task {suite}/{entry['name']}: {problems}") from error


def _describe(location: tuple[int | str, ...], message: str) -> str:
    where = ""
    for part in location:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else part
    return f"{where or 'task'}: {message}"
