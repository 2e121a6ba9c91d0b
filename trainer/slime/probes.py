"""What a job asks its data files, its hosts and its engine before its first episode.

A row that cannot be played makes its samples void; it never ends a job. A file without any row that can be played does,
and so does a row that slime itself cannot read, if `trainer.slime.hooks.data_source` sees it first. Each check returns
whether it could be made: an engine or a host may start later than the first sample.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from PIL import Image

from cuaenv.client import AsyncEnvClient, Checkpoint, EnvError, Pool, Task
from cuaenv.problems import did_you_mean
from trainer.agent.starts import start_of, task_id_of
from trainer.agent.types import BudgetExhausted, Message, ModelFailed
from trainer.config import ConfigError
from trainer.slime import slime_compat
from trainer.slime.config import Halted, SlimeConfig
from trainer.slime.play.engine import SlimeEngine
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)
_GENERATE = "trainer.slime.hooks.generate"
_LIST_TIMEOUT = timedelta(seconds=10)
#: Quoted problems of a file.
_QUOTED = 5
#: Has fewer tokens than characters in the vocabulary of any model that uses computers.
_TEXT = "the screen of the computer"
_SIDE_PX = 64


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
class DataFile:
    """A data file of slime, and its columns."""

    path: str
    input_key: str
    label_key: str | None
    metadata_key: str | None
    reads_chat: bool
    """Whether slime makes messages of a prompt that is a text."""


def data_files(args: Any) -> tuple[DataFile, ...]:
    """Return the files whose rows `trainer.slime.hooks.generate` plays."""
    has_chat = bool(getattr(args, "apply_chat_template", False) or getattr(args, "multimodal_keys", None))
    generate, found = getattr(args, "custom_generate_function_path", None), []
    if getattr(args, "prompt_data", None) and generate == _GENERATE:
        found.append(DataFile(args.prompt_data, args.input_key, args.label_key, args.metadata_key, has_chat))
    for each in getattr(args, "eval_datasets", None) or ():
        if (each.custom_generate_function_path or generate) == _GENERATE:
            reads_chat = bool(each.apply_chat_template or each.multimodal_keys or has_chat)
            found.append(DataFile(each.path, each.input_key, each.label_key, each.metadata_key, reads_chat))
    return tuple(dict.fromkeys(found))


def refuse_rows(args: Any, config: SlimeConfig) -> None:
    """Refuse rows that slime cannot read, and files without a row that can be played. Raises: ConfigError, OSError."""
    for file in data_files(args):
        unread = [
            f"row {number}: {problem}"
            for number, row in _rows(file)
            if (problem := _unread(row, file, has_images=not config.agent.text_only))
        ]
        if unread:
            raise ConfigError(f"{file.path}: slime cannot read {len(unread)} rows: {_quoted(unread)}")
        _problems(file, config, {})


async def warn_of_rows(files: Sequence[DataFile], config: SlimeConfig, client: AsyncEnvClient) -> bool:
    """Warn of rows that cannot be played, also of those whose task no host has; return whether a host answered.

    Raises:
        ConfigError: No row of a file can be played.
    """
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


def _problems(file: DataFile, config: SlimeConfig, tasks: Mapping[str, Task]) -> tuple[int, list[str]]:
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


def _unread(row: Mapping[str | None, Any], file: DataFile, *, has_images: bool) -> str:
    """Return why slime cannot read a row; empty if it can."""
    prompt = row.get(file.input_key)
    if prompt is None:
        return f"no {file.input_key} (--input-key); add the task's instruction as messages"
    if has_images and isinstance(prompt, str) and not file.reads_chat:
        return f"{file.input_key} is a text; write a list of messages"
    if file.label_key is not None and file.label_key not in row:
        return f"no {file.label_key} (--label-key); add the task's id"
    return ""


def _rows(file: DataFile) -> Iterator[tuple[int, Mapping[str | None, Any]]]:
    """Yield rows with their numbers, from 1, as slime reads them. Raises: OSError, ValueError."""
    for number, row in enumerate(slime_compat.read_rows(file.path), start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{file.path}: row {number} is a {type(row).__name__}; write an object")
        yield number, row


def _quoted(problems: list[str]) -> str:
    more = f"; and {len(problems) - _QUOTED} more" if len(problems) > _QUOTED else ""
    return "; ".join(problems[:_QUOTED]) + more


def capacity_warning(*, concurrency: int, group_size: int, capacity: int, is_forked: bool) -> str | None:
    """Return a warning if slime runs more episodes than there are machines, else None.

    Args:
        concurrency: Concurrent episodes: `--sglang-server-concurrency` times engines.
        group_size: `--n-samples-per-prompt`.
        capacity: Machines of all hosts.
        is_forked: Whether a group takes all its machines together.
    """
    if is_forked and concurrency < group_size:
        return (
            f"slime runs {concurrency} concurrent episodes, but a group has {group_size}: machines of members that wait"
            " for their turn are idle. Raise --sglang-server-concurrency, or set envd.group to off"
        )
    # Groups are complete: the last one may have started with its first member only.
    needed = -(-concurrency // group_size) * group_size if is_forked else concurrency
    if needed > capacity:
        return (
            f"slime runs {concurrency} concurrent episodes, which need {needed} machines, but there are {capacity}: the"
            " others wait in the queue, up to envd.agent.reset_timeout_s. Set --sglang-server-concurrency to"
            f" {capacity} / engines"
        )
    return None


def tree_obstacle(pools: Iterable[Pool]) -> str | None:
    """Return why a tree cannot grow in these pools, of which one would get its branches; None if it can."""
    for pool in pools:
        if pool.not_forkable:
            return f"envd.group is tree, but pool {pool.name} of {pool.host} has no branches: {pool.not_forkable}"
    return None


async def warn_of_capacity(args: Any, config: SlimeConfig, client: AsyncEnvClient) -> bool:
    """Ask the daemons for their capacity, and warn if slime runs more episodes; return whether they answered.

    Raises: ConfigError: The group is a tree, and a pool cannot copy running machines.
    """
    try:
        pools = await client.list_pools(timeout=timedelta(seconds=10))
    except EnvError:
        return False  # the first reset reports the error
    used = [pool for pool in pools if config.pool in ("", pool.name)]
    if config.group == "tree" and (problem := tree_obstacle(used)):
        raise ConfigError(f"{problem}; set envd.group to fork")
    warning = capacity_warning(
        concurrency=args.sglang_server_concurrency * slime_compat.engine_count(args),
        group_size=args.n_samples_per_prompt,
        capacity=sum(pool.capacity for pool in used),
        is_forked=config.group == "fork",
    )
    if warning:
        logger.warning("[envd] %s", warning)
    return True


async def warn_of_engine(engine: SlimeEngine, chat: Chat) -> bool:
    """Send one probe, and warn if the engine read other ids than it was sent; return whether it answered.

    An engine that decodes the ids of prompts with images and tokenises the text again reads other ids wherever a
    sampled reply is not what its text tokenises to. Each such sample is void (`PromptMismatch`); those that stay are a
    biased selection.

    Args:
        engine: The engine, which gets pictures in requests.
        chat: Of a model that reads pictures.
    """
    try:
        row = await asyncio.to_thread(_probe, chat)
        if row is None:
            return True
        await asyncio.to_thread(engine.encode, row.images)
        read = (await engine.sample(row, limit=1)).prompt_tokens
    except (BudgetExhausted, ModelFailed):
        return False  # the first episode reports the error
    if read != row.token_count:
        logger.warning(
            "[envd] engine %s: it tokenises prompts with images again (%s tokens instead of %d); samples with other ids"
            " are void (envd/void/PromptMismatch). Patch the engine: docs/train.md, section The engine",
            engine.url,
            read,
            row.token_count,
        )
    return True


def _probe(chat: Chat) -> Row | None:
    """Return a row whose ids are not those of its text; None if the vocabulary has no such ids for our text."""
    image = Image.new("RGB", (_SIDE_PX, _SIDE_PX))
    segment = chat.opening([Message("user", (image, "-"))])
    split = tuple(token for character in _TEXT for token in chat.encode(character))
    if len(split) == len(chat.encode(_TEXT)) or chat.decode(split) != _TEXT:
        return None
    return Row(replace(segment, engine_ids=segment.engine_ids + split, train_ids=segment.train_ids + split))


async def require_readable(in_files: SlimeEngine, in_requests: SlimeEngine, chat: Chat, directory: str) -> bool:
    """Check that the engine reads the files of a directory; return whether it answered.

    Args:
        in_files: The engine, whose pictures are files of the directory.
        in_requests: The engine with pictures in its requests.
        chat: Of a model that reads pictures.
        directory: `envd.picture_dir`.

    Raises:
        Halted: It reads pictures in requests, but not in files.
        OSError: The directory cannot be written.
    """
    row = Row(chat.opening([Message("user", (Image.new("RGB", (_SIDE_PX, _SIDE_PX)), "-"))]))
    try:
        await asyncio.to_thread(in_files.encode, row.images)
        await in_files.sample(row, limit=1)
    except (BudgetExhausted, ModelFailed) as error:
        try:
            await asyncio.to_thread(in_requests.encode, row.images)
            await in_requests.sample(row, limit=1)
        except (BudgetExhausted, ModelFailed):
            return False  # the first episode reports the error
        raise Halted(
            f"envd.picture_dir {directory}: engine {in_files.url} does not read its files ({error}); share the"
            " directory with the engines, or remove the key"
        ) from error
    finally:
        in_files.close()
    return True
