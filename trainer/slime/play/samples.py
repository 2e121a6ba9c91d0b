"""slime's samples: reset, fill and void one; and what the samples of a group are worth.

A void sample is one that slime carries but does not train on: two tokens and an empty mask. It enters no mean,
deviation or count. slime's default treats the batch as one group whenever its size is unexpected, which a removed
sample or a second row causes. Here a group is all samples with one `group_index`, and a rollout counts once however
many rows it has.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from trainer.rewards.credit import Credit, CreditedMember, sibling_credit
from trainer.rewards.groups import group_advantages, has_signal
from trainer.slime.slime_compat import Sample
from trainer.tokens.rows import Row

METADATA_KEY = "envd"
"""Key of the episode's facts in `Sample.metadata`."""
PADDING = "padding"
"""Void reason of samples that only pad a batch."""
_RAW_REWARD_KEY = "raw_reward"  # slime's key of the task's score
CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""Estimators whose rewards slime centres within a group."""
_SCALED = ("grpo", "gspo", "cispo")

StatusName = Literal["PENDING", "COMPLETED", "TRUNCATED", "ABORTED", "FAILED"]


def reset_sample(sample: Sample) -> None:
    """Clear an earlier attempt: slime hands out the samples of an aborted group again without clearing them."""
    sample.tokens = []
    sample.response = ""
    sample.response_length = 0
    sample.reward = None
    sample.loss_mask = None
    sample.rollout_log_probs = None
    sample.multimodal_train_inputs = None
    sample.weight_versions = []
    sample.rollout_top_p_token_ids = None
    sample.rollout_top_p_token_offsets = None
    sample.rollout_routed_experts = None
    sample.remove_sample = False
    sample.non_generation_time = 0.0
    sample.spec_info = type(sample.spec_info)()
    sample.prefix_cache_info = type(sample.prefix_cache_info)()
    sample.metadata.pop(METADATA_KEY, None)
    sample.metadata.pop(_RAW_REWARD_KEY, None)
    set_status(sample, "PENDING")


def set_status(sample: Sample, name: StatusName) -> None:
    """Set a status by name, without importing slime's enum."""
    sample.status = sample.Status[name]


def fill(sample: Sample, row: Row, args: Any) -> None:
    """Write a row into a reset sample by slime's own method, which also keeps the engine's extra columns.

    These are weight versions, cache statistics, top-p sets and routed experts.

    Raises:
        ValueError: The engine's extra columns do not match the tokens, or are missing.
    """
    sample.tokens = list(row.prompt_ids)
    for piece in row.pieces:
        sample.append_response_tokens(
            args,
            tokens=list(piece.train_ids),
            log_probs=list(piece.log_probs) if piece.sampled and not piece.is_masked else None,
            trainable=piece.sampled and not piece.is_masked,
            meta_info=dict(piece.extra) if piece.extra is not None else None,
            text=piece.text,
        )
    offsets = sample.rollout_top_p_token_offsets
    if getattr(args, "rollout_top_p", 1.0) != 1.0 and (offsets is None or len(offsets) != sample.response_length + 1):
        raise ValueError(
            "--rollout-top-p: the engine returned no top-p sets; set it to 1, or use slime's patched SGLang"
        )


def make_void(sample: Sample, args: Any, *, status: StatusName, reason: str, **facts: object) -> Sample:
    """Make a sample void, with valid values in every column that a batch may have; note facts that are not empty."""
    reset_sample(sample)
    sample.tokens = [0, 0]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    sample.reward = 0.0
    sample.remove_sample = True
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [], [0, 0]
    if getattr(args, "use_rollout_routing_replay", False):
        # Any routing except all zeros, which slime takes for a failed capture.
        layer = list(range(args.moe_router_topk))
        sample.rollout_routed_experts = [[layer for _ in range(args.num_layers)]]
    set_status(sample, status)
    note(sample, {"void": reason, **{name: fact for name, fact in facts.items() if fact != ""}})
    return sample


def spread(sample: Sample, count: int, multiple: int | None, args: Any) -> list[Sample]:
    """Return samples for the rows of one rollout: the sample and copies of it, with one rollout id.

    Args:
        sample: The rollout's sample.
        count: Number of rows.
        multiple: Void ones pad them to a multiple of this; None for the sample alone.
        args: slime's.

    Raises:
        ValueError: With `multiple`: `count` is below 1, or slime has not numbered the sample.
    """
    if multiple is None:
        return [sample]
    if count < 1 or sample.index is None:
        raise ValueError(f"sample {sample.index}: cannot make {count} rows; a numbered sample has at least one row")
    samples = [sample, *(copy.copy(sample) for _ in range(-(-count // multiple) * multiple - 1))]
    for copied in samples[1:]:
        copied.metadata = dict(sample.metadata)
        reset_sample(copied)
    for row in samples:
        row.rollout_id = sample.index
    for padding in samples[count:]:
        make_void(padding, args, status="COMPLETED", reason=PADDING)
    return samples


def void_result(
    sample: Sample, multiple: int | None, args: Any, *, status: StatusName, reason: str, **facts: object
) -> Any:
    """Make a rollout void; return its sample, or with `multiple` a list of its rows. See `make_void`, `spread`."""
    samples = spread(sample, 1, multiple, args)
    make_void(sample, args, status=status, reason=reason, **facts)
    return sample if multiple is None else samples


def is_void(sample: Sample) -> bool:
    """Return whether a sample must not be trained on: failed, aborted, removed, or without a reward."""
    return sample.remove_sample or sample.reward is None or sample.status.name in ("FAILED", "ABORTED")


def note(sample: Sample, facts: Mapping[str, object], *, raw_reward: float | None = None) -> None:
    """Add facts of the episode to the sample's metadata, and the task's score where slime expects it."""
    sample.metadata[METADATA_KEY] = {**sample.metadata.get(METADATA_KEY, {}), **facts}
    if raw_reward is not None:
        sample.metadata[_RAW_REWARD_KEY] = raw_reward


def facts_of(sample: Sample) -> Mapping[str, Any]:
    """Return the facts that `note` added; empty for samples of other environments."""
    facts: Mapping[str, Any] = (sample.metadata or {}).get(METADATA_KEY, {})
    return facts


def task_of(sample: Sample, task_key: str) -> str:
    """Return the task id of a sample's row; empty for a row that cannot be played."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return str(metadata.get(task_key) or sample.label or "")


def flatten(samples: Iterable[Any]) -> list[Sample]:
    """Return the samples of a group whose members may be lists of rows."""
    flat: list[Sample] = []
    for member in samples:
        flat.extend(flatten(member) if isinstance(member, list) else [member])
    return flat


def by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the rows of each rollout, in order of first appearance; a sample without an id is a rollout by itself."""
    rollouts: dict[object, list[Sample]] = {}
    for position, sample in enumerate(samples):
        key = ("id", sample.rollout_id) if sample.rollout_id is not None else ("position", position)
        rollouts.setdefault(key, []).append(sample)
    return list(rollouts.values())


# Groups


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
        for rows, advantage in zip(rollouts, group_advantages(rewards, by_deviation=by_deviation), strict=True):
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
                values = credit.of_tokens(row.loss_mask or (), first_turn=first_turn)
            found[id(row)] = torch.tensor(values, dtype=torch.float32)
    return found


def rollout_reward(rows: Sequence[Sample], args: Any) -> float | None:
    """Return the reward that a rollout's rows share, or None if all of them are void."""
    return next((reward_of(row, args) for row in rows if not is_void(row)), None)


def reward_of(sample: Sample, args: Any) -> float:
    """Return a sample's reward as slime reads it: a number, or the entry of `--reward-key`."""
    key = getattr(args, "reward_key", None)
    return float(sample.reward[key] if key else sample.reward)
