"""Record every finished training episode, whether the filter keeps it or not, and halt runs that cannot go well.

slime shows its log function only the samples that its filter kept, and calls it only after a rollout has ended. A
rollout whose groups are all dropped never ends. Therefore `generate` reports to the monitor of the run. The `envd/*`
metrics over the records are explained in `docs/train-watch.md`.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trainer.agent.ownership import Owner
from trainer.rewards.groups import has_signal
from trainer.slime.config import Halt, Halted, SlimeConfig
from trainer.slime.play.samples import PADDING, by_rollout, facts_of, flatten, group_credit, rollout_reward
from trainer.slime.slime_compat import Sample, log_metrics

_LEAST_LOST_GROUPS, _MOST_LOST_GROUPS = 4, 32


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


class Guard:
    """Checks the consecutive rollouts of a run."""

    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._last_good: int | None = None
        self._crossed_count = 0

    def check(self, rollout_id: int | None, metrics: Mapping[str, float], *, count: int = 1) -> None:
        """Check the next rollout, which used up `count` batches of groups; None if it has not ended. Raises: Halted."""
        crossed, crossed_count = self._halt.crossed(metrics), self._crossed_count + count
        if crossed and crossed_count >= self._halt.rollouts:
            when = "during a rollout" if rollout_id is None else f"after rollout {rollout_id}"
            good = "none" if self._last_good is None else f"rollout {self._last_good}"
            raise Halted(
                f"halted {when}: {'; '.join(crossed)}, in {crossed_count} consecutive rollouts; last rollout within"
                f" bounds: {good}. Continue from a checkpoint of that time with other settings, or change envd.halt"
            )
        if rollout_id is not None and crossed:
            self._crossed_count = crossed_count
        elif rollout_id is not None:
            self._last_good, self._crossed_count = rollout_id, 0


class RunMonitor:
    """Episodes since the last rollout, consecutive lost groups, and the bounds of `envd.halt`.

    Thread-safe: the fully asynchronous loop generates in one thread and logs in another.
    """

    def __init__(self, config: SlimeConfig) -> None:
        """Start without episodes."""
        self._config = config
        self._guard = Guard(config.halt)
        self._lock = threading.Lock()
        # Of each unfinished group, the records of its members by index.
        self._unfinished: dict[object, dict[int | None, EpisodeRecord]] = {}
        self._finished: list[list[EpisodeRecord]] = []
        self._lost_count = 0
        self._lost_reasons: Counter[str] = Counter()
        self._error = ""
        self._rollout_id: int | None = None
        self._is_logged = False

    def record(self, args: Any, samples: Any) -> None:
        """Record a finished episode: a sample or its rows. Raises: Halted, see `check`."""
        (record,) = records_of(args, flatten([samples]))
        key, size = (record.group_index, int(args.n_samples_per_prompt))
        with self._lock:
            group = self._unfinished.setdefault(key, {})
            group[record.index] = record
            if key is None or len(group) >= size:
                del self._unfinished[key]
                self._finished.append(list(group.values()))
                batch_size, is_async = int(args.rollout_batch_size), is_fully_async(args)
                # Fully asynchronous loops pass batches without a valid sample on to the learner: two are enough.
                most = (
                    min(_MOST_LOST_GROUPS, max(_LEAST_LOST_GROUPS, 2 * batch_size)) if is_async else _MOST_LOST_GROUPS
                )
                self._count_lost(self._finished[-1], most)
                if not is_async:
                    self._check_halt(batch_size)
        self.check(args)

    def take(self, args: Any) -> list[EpisodeRecord]:
        """Return the episodes of all groups that finished since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
            if not is_fully_async(args):
                self._unfinished.clear()  # slime aborted the rest of these groups and discards them
        return [record for group in finished for record in group]

    def halt(self, error: str) -> None:
        """Halt the run: `check` raises from now on."""
        self._error = self._error or error

    @property
    def is_halted(self) -> bool:
        """Whether the run is halted."""
        return bool(self._error)

    def check(self, args: Any, *, is_logging: bool = False) -> None:
        """Raise Halted if the run is halted.

        In the fully asynchronous loop only `log_rollout` may raise: it ignores exceptions of generate, and its rollouts
        end with void samples.
        """
        if self._error and (is_logging or not is_fully_async(args)):
            if not is_logging and not self._is_logged:
                self._is_logged = True
                self._log_unfinished(args)
            raise Halted(self._error)

    def _log_unfinished(self, args: Any) -> None:
        """Log the metrics of a rollout that is halted before slime calls its log function."""
        with self._lock:
            groups = [*self._finished, *(list(group.values()) for group in self._unfinished.values())]
        if groups:
            found = metrics_of([record for group in groups for record in group])
            metrics = {f"envd/{name}": value for name, value in found.items()}
            first_id = getattr(args, "start_rollout_id", None) or 0
            rollout_id = first_id if self._rollout_id is None else self._rollout_id
            log_metrics(args, metrics, rollout_id=rollout_id, prefix="rollout")

    def check_rollout(self, args: Any, rollout_id: int, metrics: dict[str, float], *, group_count: int) -> None:
        """Check the bounds after a rollout. Raises: Halted."""
        self._rollout_id = rollout_id + 1
        self.check(args, is_logging=True)
        self._guard.check(rollout_id, metrics, count=_batches(group_count, getattr(args, "rollout_batch_size", 0)))

    def _count_lost(self, group: list[EpisodeRecord], most: int) -> None:
        limit = most if self._config.max_lost_groups is None else self._config.max_lost_groups
        if sum(record.reward is not None for record in group) >= min(self._config.min_valid_members, len(group)):
            self._lost_count = 0
            self._lost_reasons.clear()
            return
        self._lost_count += 1
        self._lost_reasons.update(record.facts.get("void", "removed") for record in group if record.reward is None)
        if limit and self._lost_count >= limit:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._lost_reasons.most_common(3))
            last = next((record.facts["error"] for record in group if record.facts.get("error")), "no message")
            self.halt(
                f"{self._lost_count} consecutive groups were lost ({reasons}); last error: {last}; remove its cause, or"
                " raise envd.max_lost_groups"
            )

    def _check_halt(self, batch_size: int) -> None:
        """Check the bounds within a rollout each time it has used up another batch of groups."""
        count = _batches(len(self._finished), batch_size)
        if count > _batches(len(self._finished) - 1, batch_size) and len(self._finished) > batch_size:
            metrics = metrics_of([record for group in self._finished for record in group])
            try:
                self._guard.check(None, metrics, count=count - 1)
            except Halted as error:
                self.halt(str(error))


def _batches(group_count: int, batch_size: int) -> int:
    """Return how many batches a number of groups fills, rounded up; at least 1."""
    return max(1, -(-group_count // batch_size)) if batch_size else 1


def is_fully_async(args: Any) -> bool:
    """Return whether slime's fully asynchronous loop runs."""
    return "fully_async" in (getattr(args, "rollout_function_path", None) or "")
