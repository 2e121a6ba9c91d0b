"""Which format a file of tasks has, and all the tasks in it."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path

from envd.tasks.formats.documents import Document, Place, parse_json, read_document, read_text
from envd.tasks.formats.entries import Found, Problem, Source, make_task
from envd.tasks.formats.native import is_suite, read_suite
from envd.tasks.formats.rows import read_row

#: The suite of tasks whose format has no suites.
DEFAULT_SUITE = "imported"

_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".parquet")
_EXAMPLES = "examples"


def files_in(path: Traversable) -> Iterator[Traversable]:
    """Yield a file itself, or the files of tasks right in a directory, by their names."""
    if path.is_dir():
        yield from sorted(
            (each for each in path.iterdir() if each.name.endswith(_SUFFIXES)), key=lambda each: each.name
        )
    else:
        yield path


def read_tasks(path: Traversable, *, suite: str = DEFAULT_SUITE) -> Found:
    """Yield every task in a file, and all that is wrong.

    Args:
        path: A suite of ours, in YAML or JSON; a task of OSWorld's, or an index of such (`{domain: [ids]}`, with a
            directory `examples` beside it); rows in Parquet, JSON Lines or a JSON list.
        suite: Of tasks whose format has no suites.
    """
    source = Source(file=str(path), directory=path.parent if isinstance(path, Path) else None, suite=suite)
    try:
        yield from _read_file(path, source)
    except ValueError as error:
        yield Problem(where=source.file, message=str(error))


def _read_file(path: Traversable, source: Source) -> Found:
    if path.name.endswith(".parquet"):
        from envd.tasks.formats.tables import read_rows  # noqa: PLC0415 -- only such files are worth pyarrow's import

        yield from _read_rows(read_rows(Path(str(path))), source)
        return
    if path.name.endswith(".jsonl"):
        yield from _read_rows(map(_read_line, read_text(path).rstrip().split("\n")), source)
        return
    document = read_document(path)
    content = document.content
    if is_suite(content):
        yield from read_suite(document, source)
    elif isinstance(content, list):
        yield from _read_rows(content, source)
    elif isinstance(content, Mapping) and "evaluator" in content:
        yield from make_task(source, partial(read_row, content), locate=partial(document.locate, source.file))
    elif isinstance(path, Path) and (index := _index(content)) is not None:
        yield from _read_index(index, path, document, source)
    else:
        raise ValueError(
            "is no file of tasks: neither a suite (keys suite and tasks), nor a task of OSWorld's (id, instruction,"
            " evaluator), nor an index of such ({domain: [ids]}), nor a list of rows"
        )


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
    """Return a row, or what is wrong with its line, so that those after it are still read."""
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def _in_row(where: str, _place: Place) -> str:
    return where


def _index(content: object) -> dict[str, list[str]] | None:
    """Return what is an index, as it is; None for anything else."""
    if not isinstance(content, dict) or not content:
        return None
    is_index = all(isinstance(ids, list) and all(isinstance(each, str) for each in ids) for ids in content.values())
    return content if is_index else None


def _read_index(index: Mapping[str, list[str]], path: Path, document: Document, source: Source) -> Found:
    examples = path.parent / _EXAMPLES
    for domain, ids in index.items():
        for number, example_id in enumerate(ids):
            file = examples / domain / f"{example_id}.json"
            if file.resolve().is_relative_to(examples.resolve()) and file.is_file():
                yield from read_tasks(file, suite=source.suite)
            else:
                where = document.locate(source.file, (domain, number))
                yield Problem(where=where, field=f"{domain}[{number}]", message=f"there is no task {file}")
