"""Detect the format of a task file and read its tasks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path

from envd.tasks.formats.documents import Location, ParsedFile, parse_json, read_document, read_text
from envd.tasks.formats.entries import Found, NamedFields, Problem, Source, TaskFormatError, make_task
from envd.tasks.formats.parameters import variants
from envd.tasks.formats.rows import read_row

#: Suite of the tasks whose format has no suites.
DEFAULT_SUITE = "imported"

_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".parquet")
_EXAMPLES = "examples"
#: The version of the format.
VERSION = 1
#: The columns that can contain tasks. Others, such as images, may be large and are not read.
_COLUMNS = ("task", "task_config", "target", "prompt", "messages", "metadata", "env_config", "os_type")
_BATCH_ROWS = 256


def files_in(path: Traversable) -> Iterator[Traversable]:
    """Yield a file itself, or the task files directly in a directory, sorted by name.

    A directory without any is yielded itself, for `read_tasks` to report.
    """
    if path.is_dir():
        found = [each for each in path.iterdir() if each.name.endswith(_SUFFIXES)]
        yield from sorted(found, key=lambda each: each.name) or [path]
    else:
        yield path


def read_tasks(path: Traversable, *, suite: str = DEFAULT_SUITE) -> Found:
    """Yield the tasks and the problems of a file.

    Args:
        path: A suite in YAML or JSON; an OSWorld task, or an index of OSWorld tasks (`{domain: [ids]}`, next to a
            directory `examples`); rows in Parquet, JSON Lines or a JSON list.
        suite: Suite of the tasks whose format has no suites.
    """
    source = Source(file=str(path), directory=path.parent if isinstance(path, Path) else None, suite=suite)
    is_empty = True
    try:
        for found in _read_file(path, source):
            is_empty = False
            yield found
    except ValueError as error:
        yield Problem(where=source.file, message=str(error))
    else:
        if is_empty:
            yield Problem(where=source.file, message="has no tasks; add one, or leave the file out")


def _read_file(path: Traversable, source: Source) -> Found:
    if path.is_dir():
        raise ValueError(f"has no task files ({', '.join(_SUFFIXES)}); add one, or leave the directory out")
    if path.name.endswith(".parquet"):
        yield from _read_rows(_parquet_rows(Path(str(path))), source)
        return
    if path.name.endswith(".jsonl"):
        yield from _read_rows(map(_read_line, read_text(path).rstrip().split("\n")), source)
        return
    document = read_document(path)
    content = document.content
    if isinstance(content, Mapping) and {"suite", "tasks"} & set(content):
        yield from _read_suite(document, source)
    elif isinstance(content, list):
        yield from _read_rows(content, source)
    elif isinstance(content, Mapping) and "evaluator" in content:
        yield from make_task(source, partial(read_row, content), locate=partial(document.locate, source.file))
    elif isinstance(path, Path) and (index := _index(content)) is not None:
        yield from _read_index(index, path, document, source)
    else:
        raise ValueError(
            "is not a task file: neither a suite (keys suite and tasks), nor an OSWorld task (id, instruction,"
            " evaluator), nor an index of OSWorld tasks ({domain: [ids]}), nor a list of rows"
        )


def _read_suite(document: ParsedFile, source: Source) -> Found:
    """Read a suite: `suite`, `tasks` (each with a `name`), and optionally `version`."""
    content, file = document.content, source.file
    if not isinstance(content, Mapping) or not {"suite", "tasks"} <= set(content) <= {"version", "suite", "tasks"}:
        raise ValueError("a suite has the keys suite, tasks and optionally version, and no others")
    version, suite, tasks = content.get("version", VERSION), content["suite"], content["tasks"]
    if version is True or version != VERSION:
        message = f"unknown version {version!r}; this release reads {VERSION}"
        yield Problem(where=document.locate(file, ("version",)), field="version", message=message)
    elif not isinstance(suite, str) or not isinstance(tasks, list):
        raise ValueError("suite must be text, and tasks a list")
    else:
        for index, task in enumerate(tasks):
            yield from _read_task(document, replace(source, suite=suite), index, task)


def _read_task(document: ParsedFile, source: Source, index: int, task: object) -> Found:
    def locate(location: Location) -> str:
        return document.locate(source.file, ("tasks", index, *location))

    if not isinstance(task, Mapping) or not isinstance(task.get("name"), str):
        yield Problem(where=locate(()), message=f"tasks[{index}]: a task is a mapping with a name")
        return
    try:
        entries = variants(source.suite, task)
    except TaskFormatError as error:
        task_id, field = f"{source.suite}/{task['name']}", str(error.location[0])
        yield Problem(where=locate(error.location), task_id=task_id, field=field, message=str(error))
        return
    for entry in entries:
        yield from make_task(source, partial(_named, entry), locate=locate)


def _named(entry: Mapping[str, object]) -> NamedFields:
    fields = {str(key): value for key, value in entry.items() if key != "name"}

    def checked() -> Mapping[str, object]:
        if "task_id" in fields:
            raise TaskFormatError("derived from suite and name; remove it", "task_id")
        return fields

    return str(entry["name"]), checked


def _parquet_rows(path: Path) -> Iterator[Mapping[str, object]]:
    """Yield the rows of a file, with the columns in `_COLUMNS`. Raises: ValueError: It is not a Parquet file."""
    import pyarrow  # noqa: PLC0415 -- importing pyarrow is slow
    import pyarrow.parquet  # noqa: PLC0415

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = [name for name in table.schema_arrow.names if name in _COLUMNS]
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot be read as Parquet: {error}") from error


def _read_rows(rows: Iterable[object], source: Source) -> Found:
    for number, row in enumerate(rows, start=1):
        where = f"{source.file}: row {number}"
        if isinstance(row, ValueError):
            yield Problem(where=where, message=str(row))
        elif isinstance(row, Mapping):
            yield from make_task(source, partial(read_row, row), locate=partial(_in_row, where))
        else:
            yield Problem(where=where, message="not an object")


def _read_line(line: str) -> object:
    """Return a row, or the error in its line, so that reading continues with the next."""
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def _in_row(where: str, _location: Location) -> str:
    return where


def _index(content: object) -> dict[str, list[str]] | None:
    """Return an index unchanged; None for anything else."""
    if not isinstance(content, dict) or not content:
        return None
    is_index = all(isinstance(ids, list) and all(isinstance(each, str) for each in ids) for ids in content.values())
    return content if is_index else None


def _read_index(index: Mapping[str, list[str]], path: Path, document: ParsedFile, source: Source) -> Found:
    examples = path.parent / _EXAMPLES
    for domain, ids in index.items():
        for number, example_id in enumerate(ids):
            file = examples / domain / f"{example_id}.json"
            if file.resolve().is_relative_to(examples.resolve()) and file.is_file():
                yield from read_tasks(file, suite=source.suite)
            else:
                where = document.locate(source.file, (domain, number))
                yield Problem(where=where, field=f"{domain}[{number}]", message=f"{file}: no such task file")
