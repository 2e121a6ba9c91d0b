"""Playing oracles in episodes."""

import math
from types import SimpleNamespace
from typing import cast

import pytest

from cuaenv.actions import Action, Click, Done, Wait
from cuaenv.client import AsyncEpisode
from cuaenv.results import CommandResult
from envd.authoring.playing import ConditionNotMet, max_steps_of, play
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.oracle import WaitFor


class Episode:
    """An episode whose screen never changes."""

    def __init__(self, *, settle_ms: float) -> None:
        self.observation = SimpleNamespace(frame_id="a")
        self.waits_s: list[float] = []
        self._settle_ms = settle_ms

    async def step(self, *actions: Action) -> SimpleNamespace:
        self.waits_s += [action.duration.total_seconds() for action in actions if isinstance(action, Wait)]
        return SimpleNamespace(observation=self.observation, timings_ms={"settle": self._settle_ms})

    async def run_command(self, *_: object, **__: object) -> CommandResult:
        return CommandResult(exit_code=0, stdout=b"absent\n", stderr=b"")


def test_an_oracle_has_steps_to_wait_for_a_busy_guest_within_the_limit_of_the_daemon() -> None:
    task = TaskCatalogue.load().get("desktop/calculate-and-note")
    assert max_steps_of(task, limit=1000) > task.max_steps
    assert max_steps_of(task, limit=40) == 40


@pytest.mark.parametrize(
    ("settle_ms", "max_wait_s", "waits_s"),
    [(60, 10, [1, 2]), (2000, 10, [1, 2, 4, 8]), (60, math.inf, [1, 2, 4, 8, 15, 30])],
)
async def test_a_limited_wait_ends_in_an_idle_guest(settle_ms: float, max_wait_s: float, waits_s: list[float]) -> None:
    episode = Episode(settle_ms=settle_ms)
    await play(
        cast(AsyncEpisode, episode),
        ((Click(1, 1),), (Done(),)),
        runs_guests=True,
        on_step=lambda *_: None,
        max_wait_s=max_wait_s,
    )
    assert episode.waits_s == waits_s


async def test_a_condition_that_an_idle_guest_does_not_meet_is_given_up() -> None:
    episode = Episode(settle_ms=60)
    condition = WaitFor.model_validate({"file": "/home/user/a.txt"})
    with pytest.raises(ConditionNotMet, match="until the guest was idle"):
        await play(
            cast("AsyncEpisode", episode),
            ((Click(1, 1), condition), (Done(),)),
            runs_guests=True,
            on_step=lambda *_: None,
            max_wait_s=600,
        )
    assert episode.waits_s == [0.5] * 6
