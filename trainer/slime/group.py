"""Normalise rewards within their groups, for `--custom-reward-post-process-path`.

slime's default treats the batch as one group whenever its size is unexpected, which a removed sample or a second row
causes. Here a group is all samples with one `group_index`, a rollout counts once however many rows it has, and a void
sample enters no mean, deviation or count.
"""

from collections.abc import Sequence
from typing import Any

from trainer.rewards.groups import advantages
from trainer.slime.config import SlimeConfig
from trainer.slime.credit import group_credit, token_advantages
from trainer.slime.replay import build_tensors, show_successes
from trainer.slime.samples import by_rollout, facts_of, is_void
from trainer.slime.slime_compat import Sample

CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED = ("grpo", "gspo", "cispo")


def normalize_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[Any]]:
    """Return each sample's raw reward and the reward that the learner gets; both are 0 for void samples.

    As in slime, rewards stay raw for estimators that slime does not centre (`ppo`, `reinforce_plus_plus`) and with
    `--disable-rewards-normalization`. With `envd.credit: siblings` the learner gets a tensor instead, of shape
    (response length,): the advantages of the row's tokens.
    """
    show_successes(args, samples)
    build_tensors(args, samples)
    raw_rewards = [0.0 if is_void(sample) else float(reward_of(sample, args)) for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in CENTRED or not getattr(args, "rewards_normalization", True):
        return raw_rewards, list(raw_rewards)
    by_deviation = estimator in _SCALED and getattr(args, "grpo_std_normalization", True)
    groups: dict[object, list[Sample]] = {}
    for position, sample in enumerate(samples):
        # A sample without an index is a group by itself.
        key = ("alone", position) if sample.group_index is None else ("group", sample.group_index)
        groups.setdefault(key, []).append(sample)
    advantage_by_sample: dict[int, Any] = {}
    # Without settings of ours, samples of other rollouts pass through.
    by_siblings = bool(getattr(args, "envd", None)) and SlimeConfig.from_args(args).credit == "siblings"
    for group in groups.values():
        rollouts = by_rollout(group)
        rewards = [rollout_reward(rows, args) for rows in rollouts]
        if by_siblings:
            advantage_by_sample |= _by_token(rollouts, rewards, by_deviation=by_deviation)
            continue
        for rows, advantage in zip(rollouts, advantages(rewards, by_deviation=by_deviation), strict=True):
            advantage_by_sample.update({id(row): 0.0 if is_void(row) else advantage for row in rows})
    return raw_rewards, [advantage_by_sample[id(sample)] for sample in samples]


def _by_token(
    rollouts: Sequence[Sequence[Sample]], rewards: Sequence[float | None], *, by_deviation: bool
) -> dict[int, Any]:
    import torch  # noqa: PLC0415 -- with slime there is torch; without it nothing here needs it

    credits_ = group_credit([facts_of(rows[0]) for rows in rollouts], rewards, by_deviation=by_deviation)
    found = {}
    for rows, credit in zip(rollouts, credits_, strict=True):
        for row in rows:
            values = [0.0] * row.response_length
            if not is_void(row):
                first_turn = facts_of(row)["first_turn"]
                values = token_advantages(credit, first_turn=first_turn, loss_mask=row.loss_mask or ())
            found[id(row)] = torch.tensor(values, dtype=torch.float32)
    return found


def rollout_reward(rows: Sequence[Sample], args: Any) -> float | None:
    """Return the reward that a rollout's rows share, or None if all of them are void."""
    return next((float(reward_of(row, args)) for row in rows if not is_void(row)), None)


def reward_of(sample: Sample, args: Any) -> float:
    """Return a sample's reward as slime reads it: a number, or the entry of `--reward-key`."""
    key = getattr(args, "reward_key", None)
    return float(sample.reward[key] if key else sample.reward)
