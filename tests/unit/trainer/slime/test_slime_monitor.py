"""The monitor records all episodes of a run and halts it; slime's filter and log function see only kept samples."""

from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slime import Sample, ScriptedEngine, stand_in_slime
from trainer.slime import job, monitor
from trainer.slime.config import Halted
from trainer.slime.hooks import log_rollout
from trainer.slime.job import job_of
from trainer.slime.play.samples import make_void, note, set_status

COUNTS = {"turns": 1, "shared_turns": 0, "rows": 1, "reply_tokens": 5, "parsed": 1, "fallbacks": 0}
FACTS = {**COUNTS, "reason": "done", "timings_s": {}, "reward_parts": {}}
NO_BOUNDS: dict[str, Any] = {"halt": {"above": {}}}
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@pytest.fixture(autouse=True)
def _new_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_jobs", {})


def args_of(**changed: Any) -> Any:
    envd = {"hosts": ["127.0.0.1:1"], **changed.pop("envd", {})}
    values = {"envd": envd, "n_samples_per_prompt": 2, "rollout_batch_size": 2, "rollout_function_path": None}
    return SimpleNamespace(**{**values, **changed})


def group_of(group_index: int, *scores: float | None) -> list[Any]:
    """Return samples with these scores; None for a void one."""
    samples = []
    for member, score in enumerate(scores):
        sample = Sample(group_index=group_index, index=group_index * 10 + member)
        if score is None:
            make_void(sample, SimpleNamespace(), status="FAILED", reason="TaskNotFound", error="no task a/b")
        else:
            sample.reward = score
            set_status(sample, "COMPLETED")
            note(sample, {**FACTS, "task_score": score})
        samples.append(sample)
    return samples


def record(args: Any, *groups: list[Any]) -> None:
    for group in groups:
        for sample in group:
            job_of(args).monitor.record(args, sample)


def logged(args: Any, kept: list[Any], rollout_id: int = 0) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    with stand_in_slime(ScriptedEngine(str)):
        log_rollout(rollout_id, args, kept, extra, 1.0)
    return extra


def test_metrics_count_the_groups_that_the_filter_drops() -> None:
    args = args_of()
    kept = [group_of(0, 1.0, 0.0), group_of(1, 1.0, 0.0)]
    record(args, *kept, group_of(2, None, None), group_of(3, 1.0, 1.0))
    metrics = logged(args, kept)
    assert (metrics["envd/void_frac"], metrics["envd/void/TaskNotFound"]) == (0.25, 2.0)
    assert (metrics["envd/zero_std_frac"], metrics["envd/kept/zero_std_frac"]) == (0.5, 0.0)
    assert (metrics["envd/task_score"], metrics["envd/kept/task_score"]) == (pytest.approx(4 / 6), 0.5)
    assert (metrics["envd/success_frac"], metrics["envd/kept/success_frac"]) == (pytest.approx(4 / 6), 0.5)
    assert metrics["envd/kept/void_frac"] == 0.0


def test_each_episode_counts_in_one_rollout_and_aborted_groups_in_none() -> None:
    args = args_of()
    record(args, group_of(0, 1.0, 0.0), group_of(1, 1.0, 0.0)[:1])
    assert logged(args, [group_of(0, 1.0, 0.0)])["envd/task_score"] == 0.5
    record(args, group_of(2, 1.0, 1.0))
    assert logged(args, [group_of(2, 1.0, 1.0)])["envd/task_score"] == 1.0


def test_the_fully_asynchronous_loop_counts_groups_that_span_rollouts() -> None:
    args = args_of(rollout_function_path=FULLY_ASYNC)
    first, second = group_of(1, 1.0, 0.0)
    record(args, group_of(0, 0.0, 0.0), [first])
    assert logged(args, [group_of(0, 0.0, 0.0)])["envd/task_score"] == 0.0
    record(args, [second])
    assert logged(args, [[first, second]])["envd/task_score"] == 0.5


def test_halt_uses_the_figures_of_all_episodes() -> None:
    args = args_of(envd={"halt": {"above": {"void_frac": 0.3}, "rollouts": 1}})
    kept = [group_of(0, 1.0, 0.0)]
    record(args, *kept, group_of(1, None, None))
    with pytest.raises(Halted, match=r"after rollout 0: void_frac is 0\.5, above 0\.3"):
        logged(args, kept)


def test_halt_acts_within_a_rollout_that_uses_up_many_groups() -> None:
    args = args_of(envd={"halt": {"above": {"zero_std_frac": 0.9}, "rollouts": 2}})
    record(args, *(group_of(index, 0.0, 0.0) for index in range(4)))
    with pytest.raises(Halted, match=r"during a rollout: zero_std_frac is 1, above 0\.9, in 2 consecutive rollouts"):
        record(args, group_of(4, 0.0, 0.0))


def test_a_halt_within_a_rollout_logs_the_metrics_that_led_to_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []

    def log(args: Any, metrics: Mapping[str, float], *, rollout_id: int, prefix: str) -> None:
        seen.append((rollout_id, metrics["envd/void_frac"]))

    monkeypatch.setattr(monitor, "log_metrics", log)
    args = args_of(envd={"max_lost_groups": 1})
    logged(args, [group_of(0, 1.0, 0.0)], rollout_id=4)
    for _ in range(2):
        with pytest.raises(Halted):
            record(args, group_of(1, None, None))
    assert seen == [(5, 1.0)]


def test_consecutive_lost_groups_halt_the_run_with_the_last_error() -> None:
    args = args_of(envd={"max_lost_groups": 3, **NO_BOUNDS})
    lost = [group_of(index, None, None) for index in range(6)]
    record(args, *lost[:2], group_of(9, 0.0, 0.0), *lost[2:4])
    with pytest.raises(Halted, match=r"3 consecutive groups were lost \(TaskNotFound 6\); last error: no task a/b;"):
        record(args, lost[4])
    with pytest.raises(Halted, match="3 consecutive groups"):
        job_of(args).monitor.check(args)


def test_zero_never_halts_for_lost_groups() -> None:
    args = args_of(envd={"max_lost_groups": 0, **NO_BOUNDS})
    record(args, *(group_of(index, None, None) for index in range(100)))


@pytest.mark.parametrize(("function", "limit"), [({"rollout_function_path": FULLY_ASYNC}, 4), ({}, 32)])
def test_few_lost_groups_are_enough_where_empty_batches_reach_the_learner(function: dict[str, str], limit: int) -> None:
    args = args_of(envd=NO_BOUNDS, **function)
    args.rollout_batch_size = 2
    for index in range(limit - 1):
        record(args, group_of(index, None, None))
    assert not job_of(args).monitor.is_halted
    with suppress(Halted):
        record(args, group_of(limit, None, None))
    assert job_of(args).monitor.is_halted


def test_in_the_fully_asynchronous_loop_only_the_log_function_raises() -> None:
    args = args_of(envd={"max_lost_groups": 1}, rollout_function_path=FULLY_ASYNC)
    lost = group_of(0, None, None)
    record(args, lost)
    assert job_of(args).monitor.is_halted
    with pytest.raises(Halted, match="1 consecutive groups"):
        logged(args, [lost])
