"""Replay earlier successes to groups that failed: `envd.replay`.

The pool belongs to the job. Successful training episodes are added with their tokens, log-probabilities and
screenshots; evaluations add nothing. `hooks.keep_informative` replaces a member of a failed group by a success before
it judges the group; if slime calls no filter, as in its fully asynchronous loop, `hooks.normalize_rewards` does it.
`hooks.data_source` saves and resumes the pool with slime's checkpoints. The image tensors of a replay are built when
rewards are normalised: no episode waits for the loop then. Replayed samples were sampled by earlier weights and are
off-policy: `--use-tis` or `--use-rollout-logprobs` must weight them.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.agent.types import ModelFailed, Trajectory, data_uri
from trainer.replay.injection import inject
from trainer.replay.pool import ReplayPool
from trainer.replay.reader import read_jsonl
from trainer.replay.trajectory import StoredTrajectory, TokenRow, image_of
from trainer.slime import slime_compat
from trainer.slime.config import SlimeConfig
from trainer.slime.play.samples import facts_of, flatten, is_void, make_void, note, reset_sample, set_status, spread
from trainer.slime.slime_compat import Sample

if TYPE_CHECKING:
    from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)

#: Metadata key of the trajectory whose image tensors are not built yet.
_PENDING_KEY = "envd_replay"


def load_files(pool: ReplayPool) -> None:
    """Add the successes of the files in its settings to a pool. Raises: OSError."""
    settings = pool.settings
    for file in settings.files:
        read = read_jsonl(file, success_at=settings.success_at, max_per_task=settings.max_per_task)
        known = [trajectory for trajectory in read.trajectories if trajectory.start]
        logger.info("[envd] replay: %s: %s; %d are new", file, read, pool.load(known))
        if unknown_count := len(read.trajectories) - len(known):
            logger.warning(
                "[envd] replay: %s: %d trajectories are never replayed: it is unknown how they started; use those that"
                " a job saved (replay/trajectories), which have `start`",
                file,
                unknown_count,
            )


async def keep_success(
    pool: ReplayPool, trajectory: Trajectory, rows: "Sequence[Row]", samples: Sequence[Sample]
) -> None:
    """Add a training episode to the pool if it succeeded and was paid for it. Encodes its screenshots in a thread.

    One that branched from another member is left out: it began in mid-episode, not where a failed group does.
    """
    score = 0.0 if trajectory.evaluation is None else trajectory.evaluation.score
    facts = facts_of(samples[0])
    if trajectory.shared_turn_count or not facts.get("start") or not facts["is_paid"]:
        return
    if score >= pool.settings.success_at:
        pool.add(await asyncio.to_thread(_stored, trajectory, score, rows, samples))


def _stored(trajectory: Trajectory, score: float, rows: "Sequence[Row]", samples: Sequence[Sample]) -> StoredTrajectory:
    # Rows share screenshots: store each once.
    unique = {id(image): image for row in rows for image in row.trained_images}
    numbers = {key: number for number, key in enumerate(unique)}
    replies = [{"role": "assistant", "content": turn.reply.text} for turn in trajectory.turns]
    return StoredTrajectory(
        task_id=trajectory.task_id,
        start=facts_of(samples[0])["start"],
        messages=({"role": "user", "content": trajectory.instruction}, *replies),
        images=tuple(data_uri(image) for image in unique.values()),
        reward=score,
        metadata={
            "source": "online",
            "reward_total": samples[0].reward,
            "weight_versions": [list(sample.weight_versions) for sample, _ in zip(samples, rows, strict=False)],
        },
        rows=tuple(
            TokenRow(
                tokens=tuple(sample.tokens),
                response_length=sample.response_length,
                loss_mask=tuple(sample.loss_mask or ()),
                log_probs=tuple(sample.rollout_log_probs or ()),
                images=tuple(numbers[id(image)] for image in row.trained_images),
            )
            for sample, row in zip(samples, rows, strict=False)
        ),
    )


def show_success(pool: ReplayPool, args: Any, config: SlimeConfig, samples: list[Any]) -> None:
    """Replace a member of a complete group by a success, if the raw scores of all valid members are failures.

    Only by one with the group's start. A group whose members started differently gets none.

    Args:
        pool: The successes.
        args: slime's.
        config: The configuration.
        samples: The group's members, each a sample or its rows. Changed in place; its length stays.
    """
    heads = [next((row for row in flatten([member]) if not is_void(row)), None) for member in samples]
    facts = [None if head is None else facts_of(head) for head in heads]
    starts = {(str(known["task_id"]), str(known.get("start", ""))) for known in facts if known}
    if len(starts) != 1:
        return
    [(task_id, start)] = starts
    if not start:
        return
    raw_rewards = [float(known["task_score"]) if known else None for known in facts]
    injected = inject(pool, task_id, raw_rewards, start=start)
    if injected is not None:
        index, success = injected
        samples[index] = _replayed(args, config, samples[index], success)


def show_successes(pool: ReplayPool, args: Any, config: SlimeConfig, samples: Sequence[Sample]) -> None:
    """Call `show_success` for each group of a rollout if slime calls no filter.

    Does nothing if members may have several rows: in the flat list that slime passes to its normaliser, a success
    cannot have more rows than the member that it replaces.
    """
    if getattr(args, "dynamic_sampling_filter_path", "unknown") is not None or config.agent.images_per_row:
        return
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.group_index is not None:
            groups.setdefault(sample.group_index, []).append(sample)
    for group in groups.values():
        show_success(pool, args, config, group)


def _replayed(args: Any, config: SlimeConfig, member: Any, success: StoredTrajectory) -> Any:
    """Return a member with the rows of a success in place of its own."""
    sample, rows = flatten([member])[0], success.rows
    reset_sample(sample)
    if not isinstance(member, list):
        # The last row, as in evaluation.
        _fill(sample, success, len(rows) - 1)
        return sample
    group = spread(sample, len(rows), config.pad_rows_to, args)
    for number, one in enumerate(group[: len(rows)]):
        _fill(one, success, number)
    return group


def _fill(sample: Sample, success: StoredTrajectory, number: int) -> None:
    metadata, row = success.metadata, success.rows[number]
    sample.tokens = list(row.tokens)
    sample.response_length = row.response_length
    sample.loss_mask = list(row.loss_mask)
    sample.rollout_log_probs = list(row.log_probs)
    sample.weight_versions = list(metadata["weight_versions"][number]) if "weight_versions" in metadata else []
    sample.reward = metadata.get("reward_total", success.reward)
    sample.metadata[_PENDING_KEY] = (success, row)
    set_status(sample, "COMPLETED")
    facts = {"task_id": success.task_id, "start": success.start, "replay": "behaviour_log_probs"}
    note(sample, {**facts, "task_score": success.reward}, raw_reward=success.reward)


def build_tensors(args: Any, samples: Sequence[Sample]) -> None:
    """Build the image tensors of replayed samples; a sample whose images do not match its tokens becomes void."""
    for sample in samples:
        pending: tuple[StoredTrajectory, TokenRow] | None = (sample.metadata or {}).pop(_PENDING_KEY, None)
        if pending is None:
            continue
        trajectory, row = pending
        try:
            images = [image_of(trajectory.images[index]) for index in row.images]
            sample.multimodal_train_inputs = slime_compat.chat(args).tensors(images, row.tokens)
        except (ModelFailed, OSError) as error:
            logger.warning("[envd] sample %s: replay of %s is void: %s", sample.index, trajectory.task_id, error)
            make_void(sample, args, status="FAILED", reason="replay")
