"""A run whose metrics leave their bounds is halted."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slime import Sample, rollout_metrics
from trainer.slime import hooks, job
from trainer.slime.config import FAMILIES, METRICS, Halt, Halted
from trainer.slime.hooks import log_rollout
from trainer.slime.monitor import Guard
from trainer.slime.play.samples import note, set_status

HALT = Halt(below={"sampled_entropy": 0.2}, above={"void_frac": 0.5}, rollouts=2)
FINE = {"sampled_entropy": 1.0, "void_frac": 0.1}
COLLAPSED = {"sampled_entropy": 0.08, "void_frac": 0.1}


def sample_of(log_probs: list[float], mask: list[int]) -> Any:
    sample = Sample(group_index=0, index=0, tokens=[1] * (len(mask) + 1), response_length=len(mask))
    sample.loss_mask, sample.rollout_log_probs, sample.reward = mask, log_probs, 1.0
    set_status(sample, "COMPLETED")
    counts = {"turns": 1, "shared_turns": 0, "rows": 1, "reply_tokens": 2, "parsed": 1, "fallbacks": 0}
    note(sample, {**counts, "task_score": 1.0, "reason": "done", "timings_s": {}, "reward_parts": {"task": 1.0}})
    return sample


def test_a_run_halts_when_a_metric_stays_out_of_bounds() -> None:
    guard = Guard(HALT)
    for rollout_id, seen in enumerate([FINE, COLLAPSED, FINE, FINE, COLLAPSED]):
        guard.check(rollout_id, seen)
    with pytest.raises(
        Halted, match=r"after rollout 5: sampled_entropy is 0\.08, below 0\.2, in 2 .* within bounds: rollout 3"
    ):
        guard.check(5, COLLAPSED)


def test_different_metrics_out_of_bounds_count_together() -> None:
    guard = Guard(HALT)
    guard.check(0, COLLAPSED)
    with pytest.raises(Halted, match=r"void_frac is 1, above 0\.5, .* within bounds: none"):
        guard.check(1, {"void_frac": 1.0})


@pytest.mark.parametrize(
    ("halt", "seen"),
    [
        (HALT, {"sampled_entropy": 0.2, "void_frac": 0.5}),
        (HALT, {}),
        (Halt(above={}), {"sampled_entropy": 0.0, "void_frac": 1.0, "undecided_frac": 1.0}),
    ],
    ids=["on the bound", "missing", "without bounds"],
)
def test_a_metric_that_crosses_no_bound_never_halts(halt: Halt, seen: dict[str, float]) -> None:
    guard = Guard(halt)
    for rollout_id in range(5):
        guard.check(rollout_id, seen)


@pytest.mark.parametrize(("name", "within", "above"), [("void_frac", 0.5, 0.51), ("undecided_frac", 0.1, 0.11)])
def test_many_void_episodes_halt_by_default(name: str, within: float, above: float) -> None:
    guard = Guard(Halt())
    for rollout_id in range(5):
        guard.check(rollout_id, {"void_frac": 0.0, "undecided_frac": 0.0, name: within})
    guard.check(5, {name: above})
    with pytest.raises(Halted, match=f"{name} is {above}, above {within}.*last rollout within bounds: rollout 4"):
        guard.check(6, {name: above})


def test_entropy_is_over_sampled_tokens_only() -> None:
    metrics_seen = rollout_metrics(SimpleNamespace(), [sample_of([-1.0, 0.0, -3.0], [1, 0, 1])])
    assert metrics_seen["sampled_entropy"] == 2.0
    assert all(name in METRICS or name.startswith(FAMILIES) for name in metrics_seen), "each can be bounded"


def test_the_log_hook_ends_the_job_and_logs_the_rollout_that_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(job, "_jobs", {})
    monkeypatch.setattr(hooks, "log_metrics", lambda args, logged_metrics, **_: logged.append(logged_metrics))
    args = SimpleNamespace(envd={"hosts": ["h:1"], "halt": {"below": {"sampled_entropy": 0.2}}})
    collapsed = [sample_of([-0.01], [1])]
    assert log_rollout(0, args, collapsed, {}, 1.0) is False
    assert logged == []
    with pytest.raises(Halted):
        log_rollout(1, args, collapsed, {}, 1.0)
    assert logged[0]["envd/sampled_entropy"] == 0.01
