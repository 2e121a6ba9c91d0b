"""Statistics of runs: what counts as void, steps per second, and that their number is bounded."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from envd.console import runs
from envd.console.runs import Runs
from envd.episodes.progress import EpisodeState, Progress
from envd.tasks.text import ScoreResult
from tests.support.clock import ManualClock
from tests.support.episode_values import episode_spec


def episode(run: str, **progress: Any) -> Any:
    return SimpleNamespace(spec=episode_spec(owner="alice", run=run), progress=Progress(**progress))


def score(value: float) -> ScoreResult:
    return ScoreResult(score=value, checks=(), timings_ms={})


def test_scores_and_losses_are_counted_and_outlive_their_episodes() -> None:
    counted = Runs(ManualClock())
    ended = EpisodeState.TRUNCATED
    every = [
        episode("main", score=score(1.0), state=ended),
        episode("main", score=score(0.5), state=ended),
        episode("main", state=EpisodeState.FAILED),
        episode("main", evaluator_error="broken", state=ended),
        episode("main", score=score(0.0), state=EpisodeState.FAILED),
        episode("main"),
    ]
    for each in every:
        counted.opened(each)
    for each in every[:-1]:
        if each.progress.score or each.progress.evaluator_error:
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
