"""Rewards, filters and metrics of groups: void samples never count, a rollout counts once."""

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.slime import Sample, ScriptedEngine, rollout_metrics, stand_in_slime
from trainer.slime.hooks import keep_informative, log_evaluation, log_rollout, normalize_rewards, reward_func
from trainer.slime.play.samples import drop_reason, make_void, note, set_status

ARGS = SimpleNamespace(
    advantage_estimator="grpo",
    rewards_normalization=True,
    grpo_std_normalization=True,
    reward_key=None,
    envd={"hosts": ["127.0.0.1:1"]},
)
FACTS = {
    "task_score": 1.0,
    "reason": "done",
    "turns": 2,
    "shared_turns": 0,
    "rows": 1,
    "reply_tokens": 10,
    "parsed": 1,
    "fallbacks": 1,
    "timings_s": {"reset": 1.0, "model": 2.0},
    "reward_parts": {"task": 1.0},
    "origin": "template",
}


def sample_of(reward: float | None, *, group: int = 0, rollout: int | None = None, **facts: Any) -> Sample:
    """Return a valid sample, or a void one for None."""
    sample = Sample(group_index=group, index=rollout, rollout_id=rollout)
    if reward is None:
        make_void(sample, ARGS, status="FAILED", reason="MachineLost")
    else:
        sample.reward = reward
        set_status(sample, "COMPLETED")
        note(sample, {**FACTS, **facts})
    return sample


def oracle(rewards: list[float]) -> list[float]:
    """Advantages of one group by the formula."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans() | st.just(True)), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_void_samples_do_not_change_other_advantages(groups: list[list[tuple[float, bool]]]) -> None:
    samples = [
        sample_of(reward if is_valid else None, group=index)
        for index, group in enumerate(groups)
        for reward, is_valid in group
    ]
    raw, normalized = normalize_rewards(ARGS, samples)
    expected = []
    for group in groups:
        alone = iter(oracle([reward for reward, is_valid in group if is_valid]))
        expected += [next(alone) if is_valid else 0.0 for _, is_valid in group]
    assert normalized == pytest.approx(expected, abs=1e-9)
    assert raw == [reward if is_valid else 0.0 for group in groups for reward, is_valid in group]


@given(GROUPS, st.randoms(use_true_random=False))
def test_groups_are_identified_by_index_and_not_by_position(
    groups: list[list[tuple[float, bool]]], random: Any
) -> None:
    samples = [sample_of(reward, group=index) for index, group in enumerate(groups) for reward, _ in group]
    in_order = {id(sample): value for sample, value in zip(samples, normalize_rewards(ARGS, samples)[1], strict=True)}
    random.shuffle(samples)
    assert normalize_rewards(ARGS, samples)[1] == pytest.approx([in_order[id(sample)] for sample in samples])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 4)), min_size=2, max_size=6))
def test_a_rollout_has_one_weight_however_many_rows_it_has(rollouts: list[tuple[float, int]]) -> None:
    samples = [sample_of(reward, rollout=number) for number, (reward, rows) in enumerate(rollouts) for _ in range(rows)]
    expected = [
        advantage
        for (_, rows), advantage in zip(rollouts, oracle([reward for reward, _ in rollouts]), strict=True)
        for _ in range(rows)
    ]
    assert normalize_rewards(ARGS, samples)[1] == pytest.approx(expected, abs=1e-9)


def test_padding_neither_has_nor_changes_an_advantage() -> None:
    rows = [sample_of(1.0, rollout=1), sample_of(None, rollout=1), sample_of(0.0, rollout=2)]
    assert normalize_rewards(ARGS, rows)[1] == pytest.approx([2**-0.5, 0.0, -(2**-0.5)], abs=1e-5)


def test_a_sample_without_a_group_has_no_advantage() -> None:
    samples = [sample_of(1.0), sample_of(0.0)]
    for sample in samples:
        sample.group_index = None
    assert normalize_rewards(ARGS, samples)[1] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "rewards"),
    [("ppo", [1.0, 0.0]), ("reinforce_plus_plus", [1.0, 0.0]), ("reinforce_plus_plus_baseline", [0.5, -0.5])],
)
def test_estimators_get_the_rewards_that_slime_gives_them(estimator: str, rewards: list[float]) -> None:
    args = SimpleNamespace(**{**vars(ARGS), "advantage_estimator": estimator})
    assert normalize_rewards(args, [sample_of(1.0), sample_of(0.0)])[1] == rewards


def test_reward_key_selects_one_of_several_rewards() -> None:
    args = SimpleNamespace(**{**vars(ARGS), "reward_key": "task"})
    samples = [sample_of(0.0), sample_of(0.0)]
    for reward, sample in enumerate(samples):
        sample.reward = {"task": float(reward)}
    assert normalize_rewards(args, samples)[0] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 0.0], None),
        ([1.0, 1.0], "zero_std_1.0"),
        ([0.3, None, None], "env_failure"),
        ([None, None], "env_failure"),
        ([1.0, None, 0.0], None),
        ([0.0, None, 0.0], "zero_std_0.0"),
    ],
)
def test_a_group_is_kept_if_its_members_differ(rewards: list[float | None], reason: str | None) -> None:
    assert drop_reason(rewards, min_valid=2) == reason


def test_the_filter_accepts_members_that_are_lists_of_rows() -> None:
    with stand_in_slime(ScriptedEngine(str)):
        group = [[sample_of(1.0, rollout=1), sample_of(None, rollout=1)], [sample_of(0.0, rollout=2)]]
        assert vars(keep_informative(ARGS, group)) == {"keep": True, "reason": None}
        group[1] = [sample_of(None, rollout=2)]
        assert vars(keep_informative(ARGS, group)) == {"keep": False, "reason": "env_failure"}


async def test_the_reward_hook_returns_existing_rewards_only() -> None:
    assert await reward_func(ARGS, sample_of(0.5)) == 0.5
    assert await reward_func(ARGS, [sample_of(0.5), sample_of(None)]) == [0.5, 0.0]
    with pytest.raises(ValueError, match="has no reward"):
        await reward_func(ARGS, Sample(index=3))


def test_metrics_are_means_over_valid_rollouts() -> None:
    samples = [
        sample_of(1.0, rollout=1),
        sample_of(0.0, rollout=2, task_score=0.0, reason="turns", turns=4, origin="other"),
        sample_of(None, rollout=3),
        sample_of(0.0, rollout=4, group=1, task_score=0.0),
    ]
    metrics = rollout_metrics(ARGS, samples)
    assert (metrics["void_frac"], metrics["void/MachineLost"]) == (0.25, 1.0)
    assert (metrics["task_score"], metrics["success_frac"], metrics["turns"]) == pytest.approx((1 / 3, 1 / 3, 8 / 3))
    assert (metrics["ended/done"], metrics["ended/turns"]) == pytest.approx((2 / 3, 1 / 3))
    assert (metrics["zero_std_frac"], metrics["mixed_origin_frac"]) == (0.5, 0.5)
    assert (metrics["seconds/reset"], metrics["reward_part/task"]) == (1.0, 1.0)


def test_metrics_without_valid_rollouts_count_the_losses() -> None:
    metrics = rollout_metrics(ARGS, [sample_of(None), sample_of(None)])
    assert (metrics["void_frac"], metrics["zero_std_frac"]) == (1.0, 1.0)
    assert "task_score" not in metrics


def test_metrics_are_logged_with_slimes_own() -> None:
    extra: dict[str, Any] = {"rollout/dynamic_filter/drop_env_failure": 1}
    assert log_rollout(3, ARGS, [[sample_of(1.0, rollout=1)]], extra, 1.0) is False
    assert extra["envd/task_score"] == 1.0
    with stand_in_slime(ScriptedEngine(str)):
        assert log_rollout(3, ARGS, [sample_of(1.0)], None, 1.0) is False


def test_void_samples_are_removed_from_an_evaluation() -> None:
    samples = [sample_of(1.0), sample_of(None), sample_of(0.0)]
    data: dict[str, Any] = {
        "held-out": {"rewards": [1.0, 0.0, 0.0], "truncated": [False] * 3, "samples": samples},
        "lost": {"rewards": [0.0], "truncated": [False], "samples": [sample_of(None)]},
    }
    extra: dict[str, Any] = {}
    assert log_evaluation(3, ARGS, data, extra) is False
    assert data == {"held-out": {"rewards": [1.0, 0.0], "truncated": [False] * 2, "samples": [samples[0], samples[2]]}}
    assert extra["eval/lost/envd/void_frac"] == 1.0


def test_an_evaluation_during_training_logs_what_is_void(caplog: pytest.LogCaptureFixture) -> None:
    """slime passes no metrics to extend, and averages what is left."""
    caplog.set_level("INFO")
    samples = [sample_of(1.0), sample_of(None)]
    data = {"held": {"rewards": [1.0, 0.0], "truncated": [False] * 2, "samples": samples}}
    with stand_in_slime(ScriptedEngine(str)):
        assert log_evaluation(3, ARGS, data, None) is False
    assert data["held"]["rewards"] == [1.0]
    assert "[envd] eval 3: {'eval/held/envd/void_frac': 0.5" in caplog.text
    assert "'eval/held/envd/success_frac': 1.0" in caplog.text


def test_a_void_sample_removes_its_prompt_from_pass_rates() -> None:
    args = SimpleNamespace(**vars(ARGS), log_passrate=True, n_samples_per_eval_prompt=2)
    samples = [sample_of(1.0), sample_of(None), sample_of(0.0), sample_of(1.0)]
    data = {"held-out": {"rewards": [1.0, 0.0, 0.0, 1.0], "truncated": [False] * 4, "samples": samples}}
    log_evaluation(3, args, data, {})
    assert data["held-out"]["rewards"] == [0.0, 1.0]
