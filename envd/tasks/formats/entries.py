"""Turn the entries of a task file into tasks, or into problems with their locations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cuaenv.problems import did_you_mean, problem_of
from envd.base.config_values import DIRECTORY_SUITES
from envd.tasks.checker_union import leaves
from envd.tasks.formats.documents import Location
from envd.tasks.formats.keys import keys_at
from envd.tasks.model import Task
from envd.tasks.systems import kinds_of_loaders
from envd.tasks.verbs import HostFile, UploadFile

_OSWORLD_TASKS = "evaluation_examples"


class TaskFormatError(ValueError):
    """An entry is not a valid or supported task; `location` is the faulty part."""

    def __init__(self, message: str, *location: int | str) -> None:
        super().__init__(message)
        self.location = location


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a task or a file."""

    where: str
    """`FILE`, `FILE:LINE` or `FILE: row N`."""
    message: str
    task_id: str = ""
    field: str = ""
    """Such as `setup[0].path`."""

    def __str__(self) -> str:
        task = f"task {self.task_id}" if self.task_id else ""
        return ": ".join(filter(None, (self.where, task, self.field, self.message)))


#: A task before validation, without its id.
Fields = dict[str, object]
#: The name of a task, and a function that returns its fields; it may raise `TaskFormatError` or `ValidationError`.
NamedFields = tuple[str, Callable[[], Mapping[str, object]]]
#: The tasks of a file, and its problems.
Found = Iterator[Task | Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of tasks."""

    file: str
    """Its name, for messages."""
    directory: Path | None
    """The base directory of `local_path` in uploads; None if uploads are not supported."""
    suite: str
    makes_bundles: bool = False
    """Whether it is a loader of bundles, whose tasks name directories of the host."""


def make_task(source: Source, read: Callable[[], NamedFields], *, locate: Callable[[Location], str]) -> Found:
    """Yield the task of an entry, or its problems.

    Args:
        read: Returns the entry's fields; may raise `TaskFormatError` or `ValidationError`.
        locate: Returns `FILE:LINE` for a location within the task.
    """
    task_id = ""
    try:
        name, fields = read()
        task_id = f"{source.suite}/{name}"
        task = Task.model_validate({**fields(), "task_id": task_id})
        parts = (*task.setup, *(leaves(task.checker) if task.checker else ()))
        if not source.makes_bundles and (kinds := kinds_of_loaders() & {part.kind for part in parts}):
            directories = " or ".join(f"`--tasks {suite}:DIR`" for suite in DIRECTORY_SUITES)
            message = f"{min(kinds)} is for a loader alone; load its tasks by {directories}"
            raise TaskFormatError(message)  # noqa: TRY301
        yield _with_host_files(task, source.directory)
    except RecursionError:
        yield Problem(where=locate(()), task_id=task_id, message="nested too deeply")
    except TaskFormatError as error:
        field = _dotted(error.location)
        yield Problem(where=locate(error.location), task_id=task_id, field=field, message=str(error))
    except ValidationError as error:
        yield from _problems_of(error, task_id, locate)


def _problems_of(error: ValidationError, task_id: str, locate: Callable[[Location], str]) -> Iterator[Problem]:
    errors = error.errors()
    for index, each in enumerate(errors):
        location = each["loc"]
        field, message = _dotted(location), problem_of(each)
        if each["type"] == "too_short" and any(other["loc"][: len(location)] == location for other in errors[:index]):
            # It has items, which are wrong.
            continue
        if each["type"] == "extra_forbidden":
            message += did_you_mean(str(location[-1]), keys_at(location[:-1]))
        elif location == ("task_id",) and each["type"] == "string_pattern_mismatch":
            field = "suite, name"
            message = f"{task_id} is not SUITE/NAME of a-z 0-9 _ -, each beginning with a letter or digit"
        yield Problem(where=locate(location), task_id=task_id, field=field, message=message)


def _with_host_files(task: Task, directory: Path | None) -> Task:
    """Return the task with absolute paths of the files that come with it. Raises: TaskFormatError."""
    verbs = list(task.setup)
    for index, verb in enumerate(verbs):
        if isinstance(verb, UploadFile):
            files = tuple(_host_file(file, directory, index, number) for number, file in enumerate(verb.files))
            verbs[index] = verb.model_copy(update={"files": files})
    return task if verbs == list(task.setup) else task.model_copy(update={"setup": tuple(verbs)})


def _host_file(file: HostFile, directory: Path | None, index: int, number: int) -> HostFile:
    location = ("setup", index, "files", number, "local_path")
    if directory is None:
        raise TaskFormatError("uploads are not supported here: the task file has no directory", *location)
    root = directory.resolve()
    if file.local_path.startswith(f"{_OSWORLD_TASKS}/"):
        # OSWorld's own paths are relative to its checkout.
        root = next((each.parent for each in root.parents if each.name == _OSWORLD_TASKS), root)
    path = (root / file.local_path).resolve()
    if not path.is_relative_to(root):
        raise TaskFormatError(f"{file.local_path!r} is not below {directory}, the task file's directory", *location)
    if not path.is_file():
        raise TaskFormatError(f"{path}: no such file", *location)
    return file.model_copy(update={"local_path": str(path)})


def _dotted(location: Location) -> str:
    """Return a location in the form `setup[0].path`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
