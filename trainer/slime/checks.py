"""What a job checks before its first episode: slime's arguments, its data files, the hosts and the engine.

Arguments that cannot work are refused, those that work badly are warned of; missing ones pass, because slime's contract
tests give only a few. A row that cannot be played makes its samples void; it never ends a job. A file without any row
that can be played does, and so does a row that slime itself cannot read, if `trainer.slime.hooks.data_source` sees it
first. Checks of data, hosts and engine return whether they could be made: an engine or a host may start later than the
first sample.
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
from trainer.agent.starts import task_id_of
from trainer.agent.types import BudgetExhausted, Message, ModelFailed
from trainer.config import InputError
from trainer.data.curriculum import ALL
from trainer.slime import slime_compat
from trainer.slime.config import Halted, SlimeConfig
from trainer.slime.play.engine import SlimeEngine
from trainer.slime.play.samples import CENTRED
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)
_GENERATE = "trainer.slime.hooks.generate"
_NORMALIZER = "trainer.slime.hooks.normalize_rewards"
_CREDIT = "trainer.slime.hooks.advantages"
_FILTER = "trainer.slime.hooks.keep_informative"
_DATA_SOURCE = "trainer.slime.hooks.data_source"
_LOG = "trainer.slime.hooks.log_rollout"
_EVALUATION_LOG = "trainer.slime.hooks.log_evaluation"
#: For hooks of users.
_IS_VOID = "leave them out by trainer.slime.hooks.is_void, see docs/train-faults.md, section Own hooks"
_LIST_TIMEOUT = timedelta(seconds=10)
#: Quoted problems of a file.
_QUOTED = 5
#: Has fewer tokens than characters in the vocabulary of any model that uses computers.
_TEXT = "the screen of the computer"
_SIDE_PX = 64


def check(args: Any, config: SlimeConfig) -> None:
    """Refuse arguments that cannot work; warn of others. Raises: InputError."""
    for problem in refusals(args, config):
        raise InputError(problem)
    for warning in warnings(args, config):
        logger.warning("[envd] %s", warning)


def refusals(args: Any, config: SlimeConfig) -> Iterator[str]:
    """Yield the reasons why the arguments cannot work."""
    if getattr(args, "partial_rollout", False):
        if config.agent.images_per_row:
            yield (
                "--partial-rollout: slime continues samples of one row, but envd.agent.images_per_row makes several;"
                " set it to 0, or remove the flag"
            )
        if config.group == "tree":
            yield "--partial-rollout: members of a tree cannot be continued; set envd.group to fork, or remove the flag"
    ranks = getattr(args, "context_parallel_size", 1) or 1
    if ranks > 1 and not config.agent.text_only:
        yield (
            f"--context-parallel-size {ranks}: screenshots are not split over context-parallel ranks; set it to 1, or"
            " train without screenshots (envd.agent.text_only)"
        )
    if config.workers and config.max_episodes:
        yield (
            f"envd.max_episodes is {config.max_episodes}, but each of envd.workers would count alone; set it to 0 and"
            " limit episodes by --sglang-server-concurrency"
        )
    if config.curriculum != ALL and getattr(args, "data_source_path", _DATA_SOURCE) != _DATA_SOURCE:
        yield f"envd.curriculum {config.curriculum}: set --data-source-path to {_DATA_SOURCE}, which applies it"
    if config.workers and config.replay:
        yield "envd.workers: successes of a worker do not reach the pool of envd.replay; remove one of the two"
    if config.replay:
        yield from _replay_refusals(args)
    yield from _credit_refusals(args, config)
    context_tokens = getattr(args, "rollout_max_context_len", None)
    if context_tokens and context_tokens < config.agent.context_tokens:
        yield (
            f"envd.agent.context_tokens is {config.agent.context_tokens}, but --rollout-max-context-len is"
            f" {context_tokens}; set both to the same value"
        )
    group_size = getattr(args, "n_samples_per_prompt", 1)
    if config.group == "fork" and 0 < config.max_episodes < group_size:
        yield (
            f"envd.max_episodes is {config.max_episodes}, but a group of {group_size} (--n-samples-per-prompt) opens"
            " all its episodes together; raise it, or set envd.group to off"
        )
    if config.agent.images_per_row and getattr(args, "log_passrate", False):
        yield (
            "--log-passrate: slime computes pass rates over rows, and envd.agent.images_per_row makes several rows per"
            " episode; remove the flag (envd/success_frac is the pass rate), or set images_per_row to 0"
        )
    unit = row_unit(args)
    if config.agent.images_per_row and unit and config.pad_rows_to % unit:
        yield (
            f"envd.agent.images_per_row makes several rows per rollout, but static micro-batches need a multiple of"
            f" {unit} rows (data parallel size x --micro-batch-size); set envd.pad_rows_to to {unit}, or use"
            " --use-dynamic-batch-size"
        )


def _credit_refusals(args: Any, config: SlimeConfig) -> Iterator[str]:
    by_token = getattr(args, "custom_advantage_function_path", None) == _CREDIT
    if config.credit != "siblings":
        if by_token:
            yield f"--custom-advantage-function-path {_CREDIT}: set envd.credit to siblings, or remove the flag"
        return
    if not by_token:
        yield f"envd.credit siblings: add --custom-advantage-function-path {_CREDIT}"
    if getattr(args, "custom_reward_post_process_path", _NORMALIZER) != _NORMALIZER:
        yield f"envd.credit siblings: set --custom-reward-post-process-path to {_NORMALIZER}"
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in CENTRED or not getattr(args, "rewards_normalization", True):
        yield (
            f"envd.credit siblings: needs an estimator of {', '.join(CENTRED)} with normalised rewards, but"
            f" --advantage-estimator is {estimator}"
        )


def _replay_refusals(args: Any) -> Iterator[str]:
    converter = getattr(args, "custom_convert_samples_to_train_data_path", None)
    if getattr(args, "custom_reward_post_process_path", _NORMALIZER) != _NORMALIZER or converter:
        yield (
            f"envd.replay: replayed samples get their screenshots from {_NORMALIZER}; set"
            " --custom-reward-post-process-path to it, and no --custom-convert-samples-to-train-data-path"
        )
    if getattr(args, "use_rollout_routing_replay", False) or getattr(args, "rollout_top_p", 1.0) != 1.0:
        yield (
            "envd.replay: it stores tokens, log-probabilities and screenshots, but no routed experts and no top-p sets;"
            " remove --use-rollout-routing-replay and set --rollout-top-p to 1"
        )
    if not (getattr(args, "use_tis", True) or getattr(args, "use_rollout_logprobs", False)):
        yield (
            "envd.replay: replayed samples are off-policy and need importance weights; add --use-tis or"
            " --use-rollout-logprobs"
        )


def warnings(args: Any, config: SlimeConfig) -> Iterator[str]:
    """Yield the problems of arguments that work, but badly."""
    if config.replay and getattr(args, "data_source_path", _DATA_SOURCE) != _DATA_SOURCE:
        yield f"--data-source-path is not {_DATA_SOURCE}: the replay pool is lost when the job ends"
    if getattr(args, "partial_rollout", False) and getattr(args, "data_source_path", _DATA_SOURCE) != _DATA_SOURCE:
        yield f"--data-source-path is not {_DATA_SOURCE}: aborted samples are lost when the job ends"
    yield from _hook_warnings(args)
    filter_path = getattr(args, "dynamic_sampling_filter_path", _FILTER)
    # Without a filter, the normaliser replays successes to members of one row.
    if config.replay and filter_path != _FILTER and (filter_path or config.agent.images_per_row):
        yield f"--dynamic-sampling-filter-path is not {_FILTER}: nothing is ever replayed"
    reply_tokens = getattr(args, "rollout_max_response_len", None)
    if reply_tokens and reply_tokens < config.agent.reply_tokens:
        yield (
            f"--rollout-max-response-len is {reply_tokens} and limits each reply; envd.agent.reply_tokens,"
            f" {config.agent.reply_tokens}, is never reached"
        )


def _hook_warnings(args: Any) -> Iterator[str]:
    """Yield what hooks other than ours do with void samples, whose reward is 0."""
    if getattr(args, "custom_reward_post_process_path", _NORMALIZER) != _NORMALIZER:
        yield (
            f"--custom-reward-post-process-path is not {_NORMALIZER}: rewards of void samples may enter their group's"
            f" mean ({_IS_VOID}), and slime's own normalises a batch of unexpected size as one group"
        )
    if getattr(args, "dynamic_sampling_filter_path", _FILTER) not in (_FILTER, None):
        yield (
            f"--dynamic-sampling-filter-path is not {_FILTER}: void samples may count as failures, so that it keeps"
            f" groups without a signal and drops others ({_IS_VOID})"
        )
    if getattr(args, "custom_rollout_log_function_path", _LOG) != _LOG:
        yield (
            f"--custom-rollout-log-function-path is not {_LOG}: no envd/* metrics are logged, and envd.halt is checked"
            " within rollouts only"
        )
    has_evaluation = getattr(args, "eval_datasets", None) or getattr(args, "eval_prompt_data", None)
    if has_evaluation and getattr(args, "custom_eval_rollout_log_function_path", _EVALUATION_LOG) != _EVALUATION_LOG:
        yield (
            f"--custom-eval-rollout-log-function-path is not {_EVALUATION_LOG}: void samples lower eval/NAME as if they"
            f" had failed ({_IS_VOID}), and no eval/NAME/envd/* are logged"
        )


def row_unit(args: Any) -> int:
    """Return the number that must divide the rows of a step; 0 if any number of rows works or args do not say."""
    if getattr(args, "use_dynamic_batch_size", False):
        return 0
    try:
        gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        return int(gpus // model * args.micro_batch_size)
    except (AttributeError, TypeError):
        return 0


# Data files


def start_of_row(metadata: object, label: object, config: SlimeConfig) -> str | Checkpoint:
    """Return where the samples of a row start. Raises: InputError: The row cannot be played."""
    key = config.task_key
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InputError(f"metadata is a {type(metadata).__name__}; write an object with {key} (envd.task_key)")
    return config.start_of_row(metadata or {}, {key: label})


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
    """Refuse rows that slime cannot read, and files without a row that can be played. Raises: InputError, OSError."""
    for file in data_files(args):
        unread = [
            f"row {number}: {problem}"
            for number, row in _rows(file)
            if (problem := _unread(row, file, has_images=not config.agent.text_only))
        ]
        if unread:
            raise InputError(f"{file.path}: slime cannot read {len(unread)} rows: {_quoted(unread)}")
        _problems(file, config, {})


async def warn_of_rows(files: Sequence[DataFile], config: SlimeConfig, client: AsyncEnvClient) -> bool:
    """Warn of rows that cannot be played, also of those whose task no host has; return whether a host answered.

    Raises:
        InputError: No row of a file can be played.
    """
    try:
        tasks = {task.task_id: task for task in await client.list_tasks(timeout=_LIST_TIMEOUT)}
    except EnvError:
        return False  # the first reset reports the error
    for file in files:
        try:
            count, problems = await asyncio.to_thread(_problems, file, config, tasks)
        except InputError:
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
    """Return the number of rows, and why some cannot be played. Raises: InputError: It has none that can be played.

    Args:
        tasks: Those of all hosts, by id; empty to check no task.
    """
    count, malformed_count, problems = 0, 0, []
    for number, row in _rows(file):
        count += 1
        try:
            start = start_of_row(row.get(file.metadata_key), row.get(file.label_key), config)
        except InputError as error:
            malformed_count += 1
            problems.append(f"row {number}: {error}")
            continue
        if tasks and (problem := _unknown(task_id_of(start), tasks)):
            problems.append(f"row {number}: {problem}")
    if count and malformed_count == count:
        raise InputError(f"{file.path}: no row can be played: {_quoted(problems)}")
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
            raise InputError(f"{file.path}: row {number} is a {type(row).__name__}; write an object")
        yield number, row


def _quoted(problems: list[str]) -> str:
    more = f"; and {len(problems) - _QUOTED} more" if len(problems) > _QUOTED else ""
    return "; ".join(problems[:_QUOTED]) + more


# Hosts


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
            " to start are idle. Raise --sglang-server-concurrency, or set envd.group to off"
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

    Raises: InputError: The group is a tree, and a pool cannot copy running machines.
    """
    try:
        pools = await client.list_pools(timeout=timedelta(seconds=10))
    except EnvError:
        return False  # the first reset reports the error
    used = [pool for pool in pools if config.pool in ("", pool.name)]
    if config.group == "tree" and (problem := tree_obstacle(used)):
        raise InputError(f"{problem}; set envd.group to fork")
    warning = capacity_warning(
        concurrency=args.sglang_server_concurrency * slime_compat.engine_count(args),
        group_size=args.n_samples_per_prompt,
        capacity=sum(pool.capacity for pool in used),
        is_forked=config.group == "fork",
    )
    if warning:
        logger.warning("[envd] %s", warning)
    return True


# Engine


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
            " are void (envd/void/PromptMismatch). Patch the engine: docs/train-faults.md, section The engine",
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
