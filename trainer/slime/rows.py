"""Check the rows of a job's data files at its start, with file, row and remedy.

A row that cannot be played makes its samples void; it never ends a job. A file without any row that can be played does,
and so does a row that slime itself cannot read, if `trainer.slime.replay.data_source` sees it first.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cuaenv.client import AsyncEnvClient, Checkpoint, EnvError, Task
from cuaenv.problems import did_you_mean
from trainer.agent.starts import start_of, task_id_of
from trainer.config import ConfigError
from trainer.slime import slime_compat
from trainer.slime.config import SlimeConfig
from trainer.slime.once import once

logger = logging.getLogger(__name__)
_GENERATE = "trainer.slime.generate.generate"
_LIST_TIMEOUT = timedelta(seconds=10)
#: Quoted problems of a file.
_QUOTED = 5


def start_of_row(metadata: object, label: object, task_key: str) -> str | Checkpoint:
    """Return where the samples of a row start. Raises: ConfigError: The row cannot be played."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata is a {type(metadata).__name__}; write an object with {task_key} (envd.task_key)")
    columns = metadata or {}
    task = columns.get(task_key) or label
    if not isinstance(task, str) or not task:
        raise ConfigError(f"no task id; add {task_key} (envd.task_key) to the metadata of the data set")
    return start_of(columns, task)


@dataclass(frozen=True, slots=True)
class _File:
    """A data file of slime, and its columns."""

    path: str
    input_key: str
    label_key: str | None
    metadata_key: str | None
    reads_chat: bool
    """Whether slime makes messages of a prompt that is a text."""


def _files(args: Any) -> list[_File]:
    """Return the files whose rows `trainer.slime.generate` plays."""
    has_chat = bool(getattr(args, "apply_chat_template", False) or getattr(args, "multimodal_keys", None))
    generate, found = getattr(args, "custom_generate_function_path", None), []
    if getattr(args, "prompt_data", None) and generate == _GENERATE:
        found.append(_File(args.prompt_data, args.input_key, args.label_key, args.metadata_key, has_chat))
    for each in getattr(args, "eval_datasets", None) or ():
        if (each.custom_generate_function_path or generate) == _GENERATE:
            reads_chat = bool(each.apply_chat_template or each.multimodal_keys or has_chat)
            found.append(_File(each.path, each.input_key, each.label_key, each.metadata_key, reads_chat))
    return list(dict.fromkeys(found))


def refuse_rows(args: Any, config: SlimeConfig) -> None:
    """Refuse rows that slime cannot read, and files without a row that can be played. Raises: ConfigError, OSError."""
    for file in _files(args):
        unread = [
            f"row {number}: {problem}"
            for number, row in _rows(file)
            if (problem := _unread(row, file, has_images=not config.agent.text_only))
        ]
        if unread:
            raise ConfigError(f"{file.path}: slime cannot read {len(unread)} rows: {_quoted(unread)}")
        _problems(file, config, {})


async def warn_of_rows(args: Any, config: SlimeConfig, client: AsyncEnvClient) -> None:
    """Warn once of rows that cannot be played, also of those whose task no host has.

    Raises:
        ConfigError: No row of a file can be played.
    """
    if files := _files(args):
        await once(("rows", config.hosts, *files), lambda: _warned(files, config, client))


async def _warned(files: list[_File], config: SlimeConfig, client: AsyncEnvClient) -> bool:
    """Check files; return whether a host answered."""
    try:
        tasks = {task.task_id: task for task in await client.list_tasks(timeout=_LIST_TIMEOUT)}
    except EnvError:
        return False  # the first reset reports the error
    for file in files:
        try:
            count, problems = await asyncio.to_thread(_problems, file, config, tasks)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            # slime has read it: it was removed since then.
            logger.warning("[envd] data %s: its rows were not checked: %s", file.path, error)
            continue
        if problems:
            logger.warning(
                "[envd] data %s: samples of %d of %d rows are void: %s",
                file.path,
                len(problems),
                count,
                _quoted(problems),
            )
    return True


def _problems(file: _File, config: SlimeConfig, tasks: Mapping[str, Task]) -> tuple[int, list[str]]:
    """Return the number of rows, and why some cannot be played. Raises: ConfigError: It has none that can be played.

    Args:
        tasks: Those of all hosts, by id; empty to check no task.
    """
    count, malformed_count, problems = 0, 0, []
    for number, row in _rows(file):
        count += 1
        try:
            start = start_of_row(row.get(file.metadata_key), row.get(file.label_key), config.task_key)
        except ConfigError as error:
            malformed_count += 1
            problems.append(f"row {number}: {error}")
            continue
        if tasks and (problem := _unknown(task_id_of(start), tasks)):
            problems.append(f"row {number}: {problem}")
    if count and malformed_count == count:
        raise ConfigError(f"{file.path}: no row can be played: {_quoted(problems)}")
    return count, problems


def _unknown(task_id: str, tasks: Mapping[str, Task]) -> str:
    """Return why no host can run a task; empty if one can."""
    # Of variants, TEMPLATE?seed=N, only templates are listed.
    task = tasks.get(task_id.partition("?")[0])
    if task is None:
        near = did_you_mean(task_id.strip().lower(), tasks)
        return f"task {task_id!r}: no host has it{near or '; name one of `envd tasks list`'}"
    if task.runnable is False:
        return f"task {task_id!r}: no host can run it: {', '.join(task.obstacles)}; remove the row"
    return ""


def _unread(row: Mapping[str | None, Any], file: _File, *, has_images: bool) -> str:
    """Return why slime cannot read a row; empty if it can."""
    prompt = row.get(file.input_key)
    if prompt is None:
        return f"no {file.input_key} (--input-key); add the task's instruction as messages"
    if has_images and isinstance(prompt, str) and not file.reads_chat:
        return f"{file.input_key} is a text; write a list of messages"
    if file.label_key is not None and file.label_key not in row:
        return f"no {file.label_key} (--label-key); add the task's id"
    return ""


def _rows(file: _File) -> Iterator[tuple[int, Mapping[str | None, Any]]]:
    """Yield rows with their numbers, from 1, as slime reads them. Raises: OSError, ValueError."""
    for number, row in enumerate(slime_compat.read_rows(file.path), start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{file.path}: row {number} is a {type(row).__name__}; write an object")
        yield number, row


def _quoted(problems: list[str]) -> str:
    more = f"; and {len(problems) - _QUOTED} more" if len(problems) > _QUOTED else ""
    return "; ".join(problems[:_QUOTED]) + more
