"""Records of finished episodes, and the `envd/*` metrics over them. Pure; `docs/train.md` explains each metric."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trainer.agent.ownership import Owner
from trainer.rewards.groups import has_signal
from trainer.slime.play.groups import group_credit, rollout_reward
from trainer.slime.play.samples import PADDING, by_rollout, facts_of
from trainer.slime.slime_compat import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """What metrics need of one episode; unlike its samples, without tokens and tensors."""

    index: int | None
    group_index: int | None
    reward: float | None
    """None if the episode is void."""
    facts: Mapping[str, Any]
    surprise: float
    """Sum of -log-probability over sampled tokens, in nats."""
    sampled_count: int

    @property
    def is_replayed(self) -> bool:
        """Whether this is a replay, which says nothing about the current policy."""
        return "replay" in self.facts


def records_of(args: Any, samples: Sequence[Sample]) -> list[EpisodeRecord]:
    """Return the records of all rollouts among samples, without padding."""
    return [
        _record_of(args, rows)
        for rows in by_rollout([sample for sample in samples if facts_of(sample).get("void") != PADDING])
    ]


def _record_of(args: Any, rows: Sequence[Sample]) -> EpisodeRecord:
    sampled = [
        log_prob
        for row in rows
        for mask, log_prob in zip(row.loss_mask or (), row.rollout_log_probs or (), strict=True)
        if mask
    ]
    head = rows[0]
    return EpisodeRecord(
        index=head.index,
        group_index=head.group_index,
        reward=rollout_reward(rows, args),
        facts=facts_of(head),
        surprise=-sum(sampled),
        sampled_count=len(sampled),
    )


def metrics_of(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Return the metrics of episodes; means are over valid ones."""
    group_metrics = _group_metrics(records)
    replayed_count = sum(record.is_replayed for record in records)
    own = [record for record in records if not record.is_replayed]
    valid = [record for record in own if record.reward is not None and record.facts]
    voids = Counter(record.facts.get("void", "removed") for record in own if record.reward is None)
    metrics = {
        "void_frac": 1 - len(valid) / len(own) if own else 0.0,
        "undecided_frac": fmean(record.facts.get("owner") == Owner.UNDECIDED.value for record in own) if own else 0.0,
        **{f"void/{reason}": float(count) for reason, count in voids.items()},
        **group_metrics,
        **({"replayed": float(replayed_count)} if replayed_count else {}),
    }
    if not valid:
        return metrics
    facts_of_valid = [record.facts for record in valid]
    outcomes = Counter(facts["reason"] for facts in facts_of_valid)
    # Each turn counts once, in the episode that sampled it.
    turn_count = max(1, sum(facts["turns"] - facts["shared_turns"] for facts in facts_of_valid))
    sampled_count = sum(record.sampled_count for record in valid)
    return metrics | {
        **({"sampled_entropy": sum(record.surprise for record in valid) / sampled_count} if sampled_count else {}),
        "reward": fmean(record.reward for record in own if record.reward is not None),
        "task_score": fmean(facts["task_score"] for facts in facts_of_valid),
        "success_frac": fmean(facts["task_score"] >= 1 for facts in facts_of_valid),
        "ended_by_guest_frac": fmean(bool(facts.get("guest_end_cause")) for facts in facts_of_valid),
        "turns": fmean(facts["turns"] for facts in facts_of_valid),
        "branched_frac": fmean(facts["shared_turns"] > 0 for facts in facts_of_valid),
        "rows": fmean(facts["rows"] for facts in facts_of_valid),
        "reply_tokens": sum(facts["reply_tokens"] for facts in facts_of_valid) / turn_count,
        "parsed_frac": sum(facts["parsed"] for facts in facts_of_valid) / turn_count,
        "fallback_frac": sum(facts["fallbacks"] for facts in facts_of_valid) / turn_count,
        **{f"ended/{reason}": count / len(valid) for reason, count in outcomes.items()},
        **{
            f"seconds/{phase}": fmean(facts["timings_s"].get(phase, 0.0) for facts in facts_of_valid)
            for phase in ("reset", "model", "step", "evaluate")
        },
        **{
            f"reward_part/{name}": fmean(facts["reward_parts"].get(name, 0.0) for facts in facts_of_valid)
            for name in sorted({name for facts in facts_of_valid for name in facts["reward_parts"]})
        },
    }


def _group_metrics(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Return the share of groups without signal, and of groups that started in more than one state."""
    rewards_by_group: dict[int, list[float | None]] = {}
    facts_by_group: dict[int, list[Mapping[str, Any]]] = {}
    origins_by_group: dict[int, set[str]] = {}
    for record in records:
        if record.group_index is not None:
            rewards_by_group.setdefault(record.group_index, []).append(record.reward)
            facts_by_group.setdefault(record.group_index, []).append(record.facts)
            if record.reward is not None and not record.is_replayed:
                origins_by_group.setdefault(record.group_index, set()).add(record.facts.get("origin", ""))
    if not rewards_by_group:
        return {}
    return {
        "zero_std_frac": fmean(not has_signal(rewards) for rewards in rewards_by_group.values()),
        "mixed_origin_frac": fmean(len(origins) > 1 for origins in origins_by_group.values())
        if origins_by_group
        else 0.0,
        **_tree_metrics([(facts, rewards_by_group[index]) for index, facts in facts_by_group.items()]),
    }


def _tree_metrics(groups: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[float | None]]]) -> dict[str, float]:
    """Return the shape of the groups whose members branched: means over those groups."""
    trees = [(facts, rewards) for facts, rewards in groups if any(found.get("parent_episode_id") for found in facts)]
    if not trees:
        return {}
    points = [
        len({(found["parent_episode_id"], found["shared_turns"]) for found in facts if found.get("parent_episode_id")})
        for facts, _ in trees
    ]
    branches = [sum(bool(found.get("parent_episode_id")) for found in facts) for facts, _ in trees]
    credit = [each for facts, rewards in trees for each in group_credit(facts, rewards)]
    return {
        "tree/branch_points": fmean(points),
        # With the member that reached the point.
        "tree/branching": fmean(1 + count / point_count for count, point_count in zip(branches, points, strict=True)),
        "tree/depth": fmean(_depth(facts) for facts, _ in trees),
        "tree/credited_frac": sum(each.sibling_count for each in credit)
        / max(1, sum(len(each.advantages) for each in credit)),
    }


def _depth(facts: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of branch points above a member."""
    parents = {found.get("episode_id"): found.get("parent_episode_id") for found in facts}
    depths = []
    for name in parents:
        depth, at = 0, name
        while at := parents.get(at):
            depth += 1
        depths.append(depth)
    return max(depths)
