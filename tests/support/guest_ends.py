"""Agents that end their guests."""

from dataclasses import replace
from typing import Any

import pytest

from cuaenv.client import Action, AsyncEpisode, EnvError, Evaluation, StepResult, TypeText

POWER_OFF = TypeText("poweroff")
"""Action that ends its guest."""


def end_guests(monkeypatch: pytest.MonkeyPatch, *, score: float = 0.0, between_steps: bool = False) -> None:
    """Make `POWER_OFF` power off the guest of its episode.

    Args:
        monkeypatch: Undoes it.
        score: Score of such an episode.
        between_steps: Whether the guest ends after the step with `POWER_OFF`.
    """
    step, evaluate = AsyncEpisode.step, AsyncEpisode.evaluate

    async def power_off(self: AsyncEpisode) -> None:
        # The guest ends before it can report that the command succeeded.
        with pytest.raises(EnvError):
            await self.run_command(["poweroff"], as_root=True)

    async def step_or_end(self: AsyncEpisode, *actions: Action, **options: Any) -> StepResult:
        ends = POWER_OFF in actions
        if ends and not between_steps:
            await power_off(self)
        result = await step(self, *actions, **options)
        if ends and between_steps:
            await power_off(self)
        return result

    async def evaluate_what_is_left(self: AsyncEpisode, **options: Any) -> Evaluation:
        evaluation = await evaluate(self, **options)
        return replace(evaluation, score=score) if evaluation.guest_end_cause else evaluation

    monkeypatch.setattr(AsyncEpisode, "step", step_or_end)
    monkeypatch.setattr(AsyncEpisode, "evaluate", evaluate_what_is_left)
