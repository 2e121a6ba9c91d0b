"""Run one sample of slime's rollout as an episode on a desktop, for `--custom-generate-function-path`.

A sample always comes back, whatever happens to machines, daemons or engines, and whatever its row holds: filled,
ABORTED because slime aborted it, or void. Only cancellation, `ConfigError` and `Halted` are raised. The event loop is
never blocked: images are encoded and tensors built in threads. Clients and groups belong to the loop that runs them, so
`train.py`, `train_async.py` and the fully asynchronous rollout call the same function.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from cuaenv.client import Checkpoint, shared_client
from trainer.agent.ownership import Owner, ruling_of, ruling_on
from trainer.agent.types import Outcome
from trainer.config import ConfigError
from trainer.slime.checks import check
from trainer.slime.config import SlimeConfig
from trainer.slime.guard import Halted
from trainer.slime.monitor import monitor_of
from trainer.slime.replay import keep_success
from trainer.slime.rollout import Rollout
from trainer.slime.rows import start_of_row, warn_of_rows
from trainer.slime.samples import StatusName, make_void, note, reset_sample, row_samples
from trainer.slime.slime_compat import Sample
from trainer.slime.workers import WorkerLost, workers_of

__all__ = ["generate"]

logger = logging.getLogger(__name__)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run the sample's task and return the filled sample; a list of rows if the history may start new ones.

    An evaluation returns one sample with the last row's tokens and the episode's reward.

    Raises:
        ConfigError: The configuration is invalid, or no row of a data file can be played; no episode was opened.
        Halted: The run cannot go well: see `envd.halt`, `envd.max_lost_groups` and `envd.daemon_timeout_s`.
    """
    return await run_sample(args, sample, sampling_params, evaluation=evaluation)


async def run_sample(
    args: Any,
    sample: Any,
    sampling_params: dict[str, Any],
    *,
    evaluation: bool = False,
    rollout_type: type[Rollout] = Rollout,
) -> Any:
    """Do as `generate`, with another type of rollout."""
    config = SlimeConfig.from_args(args)
    check(args, config)
    await warn_of_rows(args, config, shared_client(config.client))
    multiple, monitor = _multiple(config, evaluation=evaluation), monitor_of(config)
    monitor.check(args)
    if config.sight != "off" and not evaluation:
        from trainer.slime.sight import require_sight  # noqa: PLC0415 -- it imports this module

        if problem := await require_sight(args, sample, sampling_params, config):
            monitor.halt(problem)
            monitor.check(args)
    problem = _unplayable(sample, config)
    if monitor.is_halted:
        return _void(args, sample, multiple, status="FAILED", reason="halted")
    try:
        if problem:
            result = _void(args, sample, multiple, status="FAILED", reason="UnplayableRow", error=problem)
            note(sample, {"owner": Owner.CALLER.value})
        elif config.workers:
            workers = workers_of(args, config.workers)
            result = await workers.run(sample, sampling_params, evaluation=evaluation, rollout_type=rollout_type)
        else:
            result = await play(args, sample, sampling_params, evaluation=evaluation, rollout_type=rollout_type)
    except Halted as error:
        monitor.halt(str(error))
        monitor.check(args)
        result = _void(args, sample, multiple, status="FAILED", reason="halted", error=str(error))
    except WorkerLost as error:
        result = _void(args, sample, multiple, status="FAILED", reason="WorkerLost", error=str(error))
        note(sample, {"owner": Owner.TRAINER.value})
    if not evaluation and sample.status.name != "ABORTED":
        monitor.record(args, result)
    return result


async def play(
    args: Any,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    *,
    evaluation: bool,
    rollout_type: type[Rollout],
    is_alone: bool = False,
) -> Any:
    """Run a sample in this process, in its group unless `is_alone`; return it filled, or its rows. Raises: Halted."""
    config = SlimeConfig.from_args(args)
    start = start_of_row(sample.metadata, sample.label, config.task_key)
    # A repeated sample was aborted or failed; its group's machines no longer exist.
    is_alone |= evaluation or sample.status.name != "PENDING" or config.group == "off" or sample.group_index is None
    group_size = 1 if is_alone else int(args.n_samples_per_prompt)
    reset_sample(sample)
    multiple = _multiple(config, evaluation=evaluation)
    try:
        async with asyncio.timeout(config.limit_s):
            rollout = rollout_type(args, sample, sampling_params, config=config)
            rollout.keeps_partial = not evaluation and getattr(args, "partial_rollout", False)
            result = await run_rollout(args, rollout, start, group_size, multiple, evaluation=evaluation)
            await rollout.keep(is_aborted=sample.status.name == "ABORTED")
            return result
    except Halted:
        raise
    except Exception as error:
        logger.exception("[envd] sample %s is void", sample.index)
        result = _void(args, sample, multiple, status="FAILED", reason=type(error).__name__, error=str(error))
        note(sample, {"owner": ruling_of(error, acted=True).owner.value})
        return result


def _unplayable(sample: Sample, config: SlimeConfig) -> str:
    """Return why a sample's row cannot be played, if so; its metadata is a dictionary afterwards."""
    try:
        start_of_row(sample.metadata, sample.label, config.task_key)
    except ConfigError as error:
        sample.metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
        return str(error)
    return ""


def _multiple(config: SlimeConfig, *, evaluation: bool) -> int | None:
    """Return the divisor of the number of a rollout's rows; None if the result is one sample, not a list of rows."""
    # With rows, always a list: slime infers the shape of a batch from its first member.
    return config.pad_rows_to if config.agent.images_per_row and not evaluation else None


async def run_rollout(
    args: Any, rollout: Rollout, start: str | Checkpoint, group_size: int, multiple: int | None, *, evaluation: bool
) -> Sample | list[Sample]:
    """Run a rollout and write its rows into samples: one, or with `multiple` a list padded to a multiple of it."""
    sample, config = rollout.sample, rollout.config
    try:
        trajectory = await rollout.run(start, group_size=group_size)
    finally:
        await rollout.close()
    if trajectory is None or trajectory.outcome is Outcome.ABORTED:
        return _void(args, sample, multiple, status="ABORTED", reason="aborted")
    if trajectory.outcome is Outcome.FAILED:
        error = str(trajectory.error or "")
        result = _void(args, sample, multiple, status="FAILED", reason=trajectory.reason, error=error)
        # They were taken in the environment, although nothing of them is trained.
        note(
            sample,
            {
                "turns": len(trajectory.turns),
                "shared_turns": trajectory.shared_turn_count,
                "owner": ruling_on(trajectory).owner.value,
            },
        )
        return result
    rows = rollout.rows[-1:] if evaluation else rollout.rows
    samples = _spread(args, sample, len(rows), multiple)
    await rollout.write(trajectory, rows, samples, evaluation=evaluation)
    if not evaluation:
        await keep_success(config, trajectory, rows, samples)
    return samples[0] if multiple is None else samples


def _spread(args: Any, sample: Sample, count: int, multiple: int | None) -> list[Sample]:
    """Return samples for `count` rows, padded to a multiple."""
    if multiple is None:
        return [sample]
    samples = row_samples(sample, -(-count // multiple) * multiple)
    for padding in samples[count:]:
        make_void(padding, args, status="COMPLETED", reason="padding")
    return samples


def _void(
    args: Any, sample: Sample, multiple: int | None, *, status: StatusName, reason: str, error: str = ""
) -> Sample | list[Sample]:
    samples = _spread(args, sample, 1, multiple)
    make_void(sample, args, status=status, reason=reason, error=error)
    return sample if multiple is None else samples
