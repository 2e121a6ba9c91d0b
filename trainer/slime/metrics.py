"""Log `envd/*` metrics with slime's own, for its log-function hooks.

Both hooks return False, so that slime logs its own metrics as well.
"""

from collections.abc import Sequence
from typing import Any

from trainer.slime.config import SlimeConfig
from trainer.slime.guard import Halted
from trainer.slime.monitor import monitor_of
from trainer.slime.records import metrics_of, records_of
from trainer.slime.replay import replay_metrics
from trainer.slime.samples import flatten, is_void
from trainer.slime.slime_compat import Sample, log_metrics

#: Metrics that are also logged over the kept samples alone.
_KEPT = ("reward", "task_score", "success_frac", "void_frac", "zero_std_frac")


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,  # noqa: ARG001 -- slime names it
) -> bool:
    """Add our metrics to those of a training rollout, for `--custom-rollout-log-function-path`.

    `envd/*` are over all episodes that finished since the last rollout, `envd/kept/*` over the samples of the batch.

    Raises:
        Halted: A metric is out of the bounds of `envd.halt`, or the run was halted for another reason.
    """
    monitor = monitor_of(SlimeConfig.from_args(args)) if getattr(args, "envd", None) else None
    kept = records_of(args, flatten(samples))
    records = monitor.take(args) if monitor else []
    # Without records, another generate function made the samples.
    counted = {**metrics_of(records or kept), **replay_metrics(args)}
    metrics = {f"envd/{name}": value for name, value in counted.items()}
    if records:
        of_kept = metrics_of(kept)
        metrics |= {f"envd/kept/{name}": of_kept[name] for name in _KEPT if name in of_kept}
        metrics |= {"envd/replayed": of_kept["replayed"]} if "replayed" in of_kept else {}
    try:
        if monitor is not None:
            groups = {record.group_index for record in records}
            monitor.check_rollout(args, rollout_id, counted, group_count=len(groups))
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

    slime's evaluations pass no `extra_metrics`: ours are then logged by themselves, at the same step.
    """
    metrics: dict[str, float] = {}
    for name in list(data):
        samples: list[Sample] = data[name]["samples"]
        metrics |= {f"eval/{name}/envd/{key}": value for key, value in rollout_metrics(args, samples).items()}
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


def rollout_metrics(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of the rollouts among samples."""
    return metrics_of(records_of(args, samples))
