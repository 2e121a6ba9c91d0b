"""What the samples of a group are worth: rewards and advantages within groups, and why a group is dropped.

slime's default treats the batch as one group whenever its size is unexpected, which a removed sample or a second row
causes. Here a group is all samples with one `group_index`, a rollout counts once however many rows it has, and a void
sample enters no mean, deviation or count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.rewards.credit import Credit, CreditedMember, sibling_credit
from trainer.rewards.groups import advantages, has_signal
from trainer.slime.play.samples import by_rollout, facts_of, is_void
from trainer.slime.slime_compat import Sample

CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED = ("grpo", "gspo", "cispo")


def normalized(args: Any, samples: Sequence[Sample], *, by_siblings: bool) -> tuple[list[float], list[Any]]:
    """Return each sample's raw reward and the reward that the learner gets; both are 0 for void samples.

    As in slime, rewards stay raw for estimators that slime does not centre (`ppo`, `reinforce_plus_plus`) and with
    `--disable-rewards-normalization`.

    Args:
        args: slime's.
        samples: Of all groups.
        by_siblings: The learner gets tensors of shape (response length,): the advantages of the rows' tokens.
    """
    raw_rewards = [0.0 if is_void(sample) else reward_of(sample, args) for sample in samples]
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
    for group in groups.values():
        rollouts = by_rollout(group)
        rewards = [rollout_reward(rows, args) for rows in rollouts]
        if by_siblings:
            advantage_by_sample |= _by_token(rollouts, rewards, by_deviation=by_deviation)
            continue
        for rows, advantage in zip(rollouts, advantages(rewards, by_deviation=by_deviation), strict=True):
            advantage_by_sample.update({id(row): 0.0 if is_void(row) else advantage for row in rows})
    return raw_rewards, [advantage_by_sample[id(sample)] for sample in samples]


def drop_reason(rewards: Sequence[float | None], *, min_valid: int) -> str | None:
    """Return why a group is not worth training on, or None if it is. A reward of None is a void member."""
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < min_valid:
        return "env_failure"
    # The reason that slime's own filter gives.
    return None if has_signal(valid) else f"zero_std_{round(valid[0], 1)}"


def group_credit(
    facts: Sequence[Mapping[str, Any]], rewards: Sequence[float | None], *, by_deviation: bool = True
) -> list[Credit]:
    """Return the credit of each rollout of a group, see `trainer.rewards.credit.sibling_credit`.

    A void rollout counts as one without turns.
    """
    members = [
        CreditedMember(
            name=found.get("episode_id") or f"void {number}",
            parent=found.get("parent_episode_id", ""),
            shared_count=found.get("shared_turns", 0),
            turn_count=found.get("turns", 0),
            reward=reward,
        )
        for number, (found, reward) in enumerate(zip(facts, rewards, strict=True))
    ]
    return sibling_credit(members, by_deviation=by_deviation)


def token_advantages(credit: Credit, *, first_turn: int, loss_mask: Sequence[int]) -> list[float]:
    """Return the advantage of each response token of a row: that of its turn, 0 for tokens that are not trained.

    Args:
        credit: The rollout's credit.
        first_turn: Turn of the row's first reply. Each run of ones in the mask is a reply: an observation follows it.
        loss_mask: The row's mask.

    Raises:
        IndexError: The mask has more replies than the rollout has turns.
    """
    found: list[float] = []
    turn, before = first_turn - 1, 0
    for trained in loss_mask:
        turn += trained and not before
        found.append(credit.of_turn(turn) if trained else 0.0)
        before = trained
    return found


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
    return next((reward_of(row, args) for row in rows if not is_void(row)), None)


def reward_of(sample: Sample, args: Any) -> float:
    """Return a sample's reward as slime reads it: a number, or the entry of `--reward-key`."""
    key = getattr(args, "reward_key", None)
    return float(sample.reward[key] if key else sample.reward)
