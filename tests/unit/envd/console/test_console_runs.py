"""Statistics of runs: what counts as void, steps per second, and that their number is bounded."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from envd.base.errors import EvaluatorFailed
from envd.console import runs
from envd.console.runs import Runs
from envd.episodes.types import EpisodeState, EvaluateResult
from tests.support.clock import ManualClock


def episode(run: str, *, verdict: object = None, state: EpisodeState = EpisodeState.ACTIVE) -> Any:
    return SimpleNamespace(
        owner="alice", run=run, verdict=verdict, state=state, has_score=isinstance(verdict, EvaluateResult)
    )


def score(value: float) -> EvaluateResult:
    return EvaluateResult(episode=cast(Any, None), score=value, checks=(), timings_ms={})


def test_scores_and_losses_are_counted_and_outlive_their_episodes() -> None:
    counted = Runs(ManualClock())
    ended = EpisodeState.TRUNCATED
    every = [
        episode("main", verdict=score(1.0), state=ended),
        episode("main", verdict=score(0.5), state=ended),
        episode("main", state=EpisodeState.FAILED),
        episode("main", verdict=EvaluatorFailed("broken"), state=ended),
        episode("main", verdict=score(0.0), state=EpisodeState.FAILED),
        episode("main"),
    ]
    for each in every:
        counted.opened(each)
    for each in every[:-1]:
        if each.verdict is not None:
            counted.scored(each)
        counted.closed(each)
    (found,) = counted.facts()
    assert {key: found[key] for key in ("run", "owner", "open", "episodes", "scored", "successes", "void")} == {
        "run": "main",
        "owner": "alice",
        "open": 1,
        "episodes": 6,
        "scored": 3,
        "successes": 1,
        "void": 2,
    }
    assert found["mean"] == pytest.approx(0.5)


async def test_steps_per_second_are_those_of_the_last_minute() -> None:
    clock = ManualClock()
    counted, one = Runs(clock), episode("main")
    counted.opened(one)
    for _ in range(30):
        counted.stepped(one, cast(Any, None))
    await clock.advance(10)
    assert [(facts["steps"], facts["rate"]) for facts in counted.facts()] == [(30, 3.0)]
    await clock.advance(51)
    assert [(facts["steps"], facts["rate"]) for facts in counted.facts()] == [(30, 0.0)]


async def test_the_run_that_was_active_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_RUNS", 2)
    clock = ManualClock()
    counted = Runs(clock)
    for name in ("first", "second", "first", "third"):
        await clock.advance(1)
        counted.opened(episode(name))
    assert [facts["run"] for facts in counted.facts()] == ["third", "first"]
