"""Every name that slime's flags use: `trainer.slime.hooks.NAME`; the table is in `trainer.slime`.

Hooks of users find here what ours know of a sample: `is_void`, `facts_of`, `flatten` and `by_rollout`.
"""

import asyncio
import logging
import pickle
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trainer.agent.starts import task_id_of
from trainer.agent.turns import History
from trainer.agent.types import ModelFailed
from trainer.config import InputError
from trainer.data.curriculum import ALL, TaskChoice
from trainer.files import append_json, write_atomically
from trainer.slime import checks, slime_compat
from trainer.slime.config import Halted
from trainer.slime.job import job_of
from trainer.slime.monitor import metrics_of, records_of
from trainer.slime.play.replay import build_tensors, show_success, show_successes
from trainer.slime.play.rollout import Partial
from trainer.slime.play.samples import (
    by_rollout,
    drop_reason,
    facts_of,
    flatten,
    is_void,
    normalized,
    rollout_reward,
    task_of,
)
from trainer.slime.play.sight import play_pictures
from trainer.slime.slime_compat import Sample, log_metrics
from trainer.tokens.chat import Chat

__all__ = [
    "advantages",
    "by_rollout",
    "data_source",
    "facts_of",
    "flatten",
    "generate",
    "generate_rollout",
    "is_void",
    "keep_informative",
    "log_evaluation",
    "log_rollout",
    "normalize_rewards",
    "play_sight",
    "record_sample",
    "reward_func",
]

logger = logging.getLogger(__name__)
#: Key in the metadata that slime saves with its data source.
_CURRICULUM_KEY: Final = "envd_curriculum"
_FORMER_MODULES = {"trainer.slime.partial": Partial.__module__, "trainer.agent.history": History.__module__}
#: Metrics that are also logged over the kept samples alone.
_KEPT = ("reward", "task_score", "success_frac", "void_frac", "zero_std_frac")


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run a sample's task as an episode on a desktop, for `--custom-generate-function-path`.

    Returns the filled sample; a list of rows if the history may start new ones. An evaluation returns one sample with
    the last row's tokens and the episode's reward. A sample always comes back, whatever happens to machines, daemons or
    engines, and whatever its row holds: filled, ABORTED because slime aborted it, or void.

    `train.py`, `train_async.py` and the fully asynchronous rollout call this same function: clients and groups belong
    to the loop that runs them.

    Raises:
        InputError: The configuration is invalid, or no row of a data file can be played; no episode was opened.
        Halted: The run cannot go well: see `envd.halt`, `envd.max_lost_groups` and `envd.daemon_timeout_s`.
    """
    return await job_of(args).play_sample(args, sample, sampling_params, evaluation=evaluation)


async def play_sight(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:  # noqa: ARG001 -- slime passes it
    """Play the episode that a sample's task `sight/NUMBER` names, for the generate function of `trainer sight`."""
    job = job_of(args)
    start = checks.start_of_row(sample.metadata, sample.label, job.config)
    number = int(task_id_of(start).rpartition("/")[2])
    return await play_pictures(args, sample, sampling_params, number, here=job.here())


async def reward_func(args: Any, sample: Any, **_: Any) -> Any:  # noqa: ARG001 -- slime names it
    """Return the reward that generate set, for `--custom-rm-path`: it is computed while the machine exists.

    Of one sample, or of each in a list (group rewards, several rows).

    Raises:
        ValueError: A sample has no reward because another generate function made it.
    """
    samples: list[Sample] = sample if isinstance(sample, list) else [sample]
    for one in samples:
        if one.reward is None:
            raise ValueError(
                f"sample {one.index} has no reward; use --custom-generate-function-path trainer.slime.hooks.generate"
            )
    return [one.reward for one in samples] if isinstance(sample, list) else sample.reward


def keep_informative(args: Any, samples: list[Any], **_: Any) -> Any:
    """Keep a group whose members differ in reward, for `--dynamic-sampling-filter-path`. Members may be lists of rows.

    Reasons for slime's `rollout/dynamic_filter/drop_*`: `env_failure` if fewer than `envd.min_valid_members` are valid,
    `zero_std_R` if all have reward R. With `envd.replay`, a success first replaces a member of a failed group.
    """
    min_valid = 2
    # Without `envd:` the groups belong to other environments; the default serves them.
    if hasattr(args, "envd"):
        job = job_of(args)
        min_valid = job.config.min_valid_members
        if job.pool is not None:
            show_success(job.pool, args, job.config, samples)
    rewards = [rollout_reward(rows, args) for rows in by_rollout(flatten(samples))]
    reason = drop_reason(rewards, min_valid=min_valid)
    return slime_compat.filter_output(keep=reason is None, reason=reason)


def normalize_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[Any]]:
    """Normalise rewards within their groups, for `--custom-reward-post-process-path`.

    Returns each sample's raw reward and the reward that the learner gets; both are 0 for void samples. With
    `envd.credit: siblings` the learner gets tensors instead, which `advantages` takes out.
    """
    by_siblings = False
    # Without settings of ours, samples of other rollouts pass through.
    if getattr(args, "envd", None):
        job = job_of(args)
        by_siblings = job.config.credit == "siblings"
        if job.pool is not None:
            show_successes(job.pool, args, job.config, samples)
    build_tensors(args, samples)
    return normalized(args, samples, by_siblings=by_siblings)


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:  # noqa: ARG001 -- slime names it
    """Set the advantages and returns of the learner's rows, for `--custom-advantage-function-path`.

    `normalize_rewards` puts a tensor of the advantages of a row's response tokens where slime expects its reward, and
    slime hands it to the learner unchanged.

    Raises:
        ValueError: The rewards are not from `normalize_rewards` with `envd.credit: siblings`.
    """
    rewards, lengths = rollout_data["rewards"], rollout_data["response_lengths"]
    if any(getattr(reward, "shape", None) != (length,) for reward, length in zip(rewards, lengths, strict=True)):
        raise ValueError(
            "--custom-advantage-function-path trainer.slime.hooks.advantages: a row has no advantages by token; set"
            " --custom-reward-post-process-path trainer.slime.hooks.normalize_rewards and envd.credit: siblings"
        )
    device = rollout_data["kl"][0].device
    rollout_data["advantages"] = [reward.to(device) for reward in rewards]
    rollout_data["returns"] = rollout_data["advantages"]


def data_source(args: Any) -> Any:
    """Return slime's data source, extended for `--data-source-path`.

    It saves and resumes pool and aborted samples, and passes over tasks as `envd.curriculum` says.

    Raises:
        InputError: A data file has rows that slime cannot read, or none that can be played.
    """
    job = job_of(args)
    # Before slime reads them: its own errors do not name the row.
    checks.refuse_rows(args, job.config)
    source = slime_compat.data_source(args)
    is_partial = getattr(args, "partial_rollout", False)
    _ = job.pool  # an unreadable file of successes ends the job now
    save, load = source.save, source.load

    def save_all(rollout_id: int) -> None:
        save(rollout_id)
        if args.save is not None and job.pool is not None:
            job.pool.save(Path(args.save) / "replay", name=str(rollout_id))
        if args.save is not None and is_partial:
            save_buffer(source, args.save, rollout_id)

    def load_all(rollout_id: int | None = None) -> None:
        load(rollout_id)
        if args.load is not None and is_partial:
            load_buffer(source, args.load, rollout_id)
        if args.load is not None:
            job.resume_pool(Path(args.load) / "replay", name=str(rollout_id))

    source.save, source.load = save_all, load_all
    if job.config.curriculum != ALL:
        chosen(source, job.tasks, task_key=job.config.task_key)
    return source


def chosen(source: Any, tasks: TaskChoice, *, task_key: str) -> None:
    """Let a data source pass over groups whose tasks are not worth playing now; see `trainer.data.curriculum`.

    What is known of tasks is saved with its state.
    It draws each row once more at most: if too few tasks are worth playing, it returns those that it passed over first.
    """
    draw, save, load = source.get_samples, source.save, source.load

    def get_samples(count: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = []
        passed_over: list[list[Sample]] = []
        draws_left = count + len(source)
        while len(groups) < count and draws_left:
            draws_left -= 1
            (group,) = draw(1)
            # Of a group that slime aborted, some members may be finished.
            is_new = all(sample.status.name == "PENDING" for sample in group)
            is_played = not is_new or tasks.plays(task_of(group[0], task_key))
            (groups if is_played else passed_over).append(group)
        return groups + passed_over[: count - len(groups)]

    def save_all(rollout_id: int) -> None:
        source.metadata[_CURRICULUM_KEY] = tasks.state()
        save(rollout_id)

    def load_all(rollout_id: int | None = None) -> None:
        load(rollout_id)
        if state := source.metadata.get(_CURRICULUM_KEY):
            tasks.resume(state)

    source.get_samples, source.save, source.load = get_samples, save_all, load_all


def save_buffer(source: Any, directory: str, rollout_id: int) -> None:
    """Write the aborted groups of slime's data source next to its own state, which lacks them. Raises: OSError."""
    path = _buffer_path(directory, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pickle.dumps(source.buffer))


def load_buffer(source: Any, directory: str, rollout_id: int | None) -> None:
    """Read the aborted groups that `save_buffer` wrote, if it did. Raises: OSError."""
    path = _buffer_path(directory, rollout_id)
    if path.exists():
        # Of the same directory, and as trusted, as the weights that slime unpickles.
        with path.open("rb") as file:
            source.buffer = _Unpickler(file).load()
        logger.info("[envd] %d aborted groups continue", len(source.buffer))


class _Unpickler(pickle.Unpickler):
    """Reads files of 0.2.0, too, in which some classes have their former modules."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """See `pickle.Unpickler`."""
        return super().find_class(_FORMER_MODULES.get(module_name, module_name), global_name)


def _buffer_path(directory: str, rollout_id: int | None) -> Path:
    return Path(directory) / "partial" / f"{rollout_id}.pickle"


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,  # noqa: ARG001 -- slime names it
) -> bool:
    """Add our metrics to those of a training rollout, for `--custom-rollout-log-function-path`.

    `envd/*` are over all episodes that finished since the last rollout, `envd/kept/*` over the samples of the batch.
    Returns False, so that slime logs its own metrics as well.

    Raises:
        Halted: A metric is out of the bounds of `envd.halt`, or the run was halted for another reason.
    """
    job = job_of(args) if getattr(args, "envd", None) else None
    kept = records_of(args, flatten(samples))
    records = job.monitor.take(args) if job else []
    # Without records, another generate function made the samples.
    counted = {**metrics_of(records or kept), **(job.pool.statistics() if job and job.pool is not None else {})}
    metrics = {f"envd/{name}": value for name, value in counted.items()}
    if records:
        of_kept = metrics_of(kept)
        metrics |= {f"envd/kept/{name}": of_kept[name] for name in _KEPT if name in of_kept}
        metrics |= {"envd/replayed": of_kept["replayed"]} if "replayed" in of_kept else {}
    try:
        if job is not None:
            groups = {record.group_index for record in records}
            job.monitor.check_rollout(args, rollout_id, counted, group_count=len(groups))
    except Halted:
        log_metrics(args, metrics, rollout_id=rollout_id, prefix="rollout")
        raise
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(metrics)
    else:
        # The fully asynchronous loop passes none.
        log_metrics(args, metrics, rollout_id=rollout_id, prefix="rollout")
    return False


def log_evaluation(
    rollout_id: int, args: Any, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None
) -> bool:
    """Remove void samples from an evaluation before slime averages it, for `--custom-eval-rollout-log-function-path`.

    A data set without valid samples is removed; only its `void` metrics are logged. With `--log-passrate`, which needs
    complete prompts, a void sample removes all samples of its prompt.

    slime's evaluations pass no `extra_metrics`: ours are then logged by themselves, at the same step. Returns False, so
    that slime logs its own metrics as well.
    """
    metrics: dict[str, float] = {}
    for name in list(data):
        samples: list[Sample] = data[name]["samples"]
        counted = metrics_of(records_of(args, samples))
        metrics |= {f"eval/{name}/envd/{key}": value for key, value in counted.items()}
        size = args.n_samples_per_eval_prompt if getattr(args, "log_passrate", False) else 1
        kept = [
            position
            for first in range(0, len(samples), size)
            for position in range(first, min(first + size, len(samples)))
            if not any(is_void(sample) for sample in samples[first : first + size])
        ]
        if kept:
            data[name] = {key: [values[position] for position in kept] for key, values in data[name].items()}
        else:
            del data[name]
    if extra_metrics is not None:
        extra_metrics.update(metrics)
    else:
        log_metrics(args, metrics, rollout_id=rollout_id, prefix="eval")
    return False


async def record_sample(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Write one JSON line per sample, for `--rollout-sample-hook-path`: its response and facts.

    Appends to `rollout-N.jsonl` or `evaluation-N.jsonl` in `envd.record_dir`; does nothing without that directory.
    """
    directory = job_of(args).config.record_dir
    if not directory:
        return
    kind = "evaluation" if evaluation else "rollout"
    path = Path(directory) / f"{kind}-{'none' if rollout_id is None else rollout_id}.jsonl"
    line = {
        "group_index": sample.group_index,
        "index": sample.index,
        "status": sample.status.value,
        "reward": sample.reward,
        "facts": dict(facts_of(sample)),
        "response": sample.response,
    }
    await asyncio.to_thread(append_json, path, line)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:  # noqa: ARG001
    """Return the next conversations of the data set as samples with tokens, masks and image tensors.

    A supervised warm-up with images, for `--rollout-function-path`. slime's own `slime.rollout.sft_rollout` (624b824a8)
    tokenises the text only: an image becomes one placeholder, and its pixels are lost. Here each placeholder is
    repeated once per image token, and the pixels are added. Masks are slime's (`--loss-mask-type`), so turns with
    `step_loss_mask` 0 are not trained. Rows come from `trainer data export-sft`: `--input-key messages
    --multimodal-keys '{"image": "images"}'`, without `--apply-chat-template`.

    Raises:
        InputError: A conversation is not a valid example; the message names its task.
    """
    if evaluation:
        raise ValueError("a supervised warm-up has no evaluation; remove --eval-interval")
    tokenizer, processor, masks = _warmup_tools(args.hf_checkpoint, args.loss_mask_type)
    chat = Chat(tokenizer, processor)
    groups: list[list[Sample]] = data_source.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        try:
            fill_conversation(sample, chat, masks)
        except (ModelFailed, InputError) as error:
            raise InputError(f"sample {sample.index} ({sample.label}): {error}") from error
    return groups


@lru_cache(maxsize=1)
def _warmup_tools(checkpoint: str, mask_type: str) -> tuple[Any, Any, Any]:
    return slime_compat.sft_tools(checkpoint, mask_type)


def fill_conversation(sample: Sample, chat: Chat, masks: Any) -> None:
    """Fill a sample with the tokens, masks and image tensors of its conversation. Raises: InputError, ModelFailed."""
    images = (sample.multimodal_inputs or {}).get("images") or []
    ids, mask = masks.get_loss_mask(sample.prompt, tools=(sample.metadata or {}).get("tools"))
    repeats = chat.repeats(ids, images)
    tokens = [token for token, count in zip(ids, repeats, strict=True) for _ in range(count)]
    loss_mask = [one for one, count in zip(mask, repeats, strict=True) for _ in range(count)]
    if 1 not in loss_mask or loss_mask[0] == 1:
        raise InputError("no turn is trained, or the first trained turn has no prompt")
    sample.tokens = tokens
    sample.loss_mask = loss_mask[loss_mask.index(1) :]
    sample.response_length = len(sample.loss_mask)
    sample.reward = 0.0
    sample.multimodal_train_inputs = chat.tensors([image.convert("RGB") for image in images], tokens)
