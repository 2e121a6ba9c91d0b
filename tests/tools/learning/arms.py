"""What an arm of an ablation changes in a rollout: machines that are lost, and members that start in other states.

An arm is a file of settings whose `rl.slime` names `generate`, and further arguments of slime that it reads:

- `fault_share`: share of training episodes whose machine is lost, between two turns or before the evaluation. The loop
  handles it as one that its host lost.
- `faults_as_zero`: count those episodes as reward 0 instead of void: what this project refuses to do, to measure its
  cost.
- `escapes_as_void`: count a guest that its agent ended as one that its host lost: also to measure what that costs.
- `drawn_seeds`: each member of a group starts with another of so many seeds of its template; needs `group: off`.
"""

import random
from dataclasses import replace
from typing import Any, NoReturn

from cuaenv.client import Action, AsyncEpisode, Checkpoint, Evaluation, GuestEnded, MachineLost, StepResult
from tests.tools.learning.wrapped import WrappedEpisode
from trainer.agent.loop import AgentEpisode
from trainer.agent.ownership import GUEST_ENDED
from trainer.agent.types import Conversation, Outcome, Trajectory
from trainer.data.split import template_id
from trainer.slime.job import job_of
from trainer.slime.play.rollout import Rollout
from trainer.slime.play.samples import facts_of, note

#: A machine is lost before one of so many first steps, or before the evaluation.
_STEPS = 3


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run a sample as the arm says; evaluations run unchanged."""
    if evaluation:
        return await job_of(args).play_sample(args, sample, sampling_params, evaluation=True)
    if seeds := getattr(args, "drawn_seeds", 0):
        seed = _rng(args, sample).randrange(seeds)
        sample.metadata["task_id"] = f"{template_id(sample.metadata['task_id'])}?seed={seed}"
    result = await job_of(args).play_sample(args, sample, sampling_params, rollout_type=_ArmRollout)
    if facts_of(sample).get("void") == EscapeLost.__name__:
        # `trainer learn` counts it as an escape.
        note(sample, {"guest_end_cause": "escape"})
    return result


class EscapeLost(MachineLost):
    """The agent ended its guest, and the episode is void as if the host had lost it."""


class _ArmRollout(Rollout):
    """A rollout whose machine may be lost."""

    async def play_attempts(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        trajectory = await super().play_attempts(start, group_size=group_size)
        is_lost = trajectory is not None and isinstance(trajectory.error, MachineLost)
        if trajectory is None or not is_lost or not getattr(self.args, "faults_as_zero", False) or not self.rows:
            return trajectory
        zero = Evaluation(score=0.0, checks=(), timings_ms={})
        return replace(trajectory, outcome=Outcome.TRUNCATED, reason="injected", error=None, evaluation=zero)

    async def play_episode(self, episode: AgentEpisode, conversation: Conversation) -> Trajectory:
        if getattr(self.args, "escapes_as_void", False):
            episode = _VoidableEpisode(episode)
        rng = _rng(self.args, self.sample)
        if rng.random() < getattr(self.args, "fault_share", 0.0) and self.episode is not None:
            episode = _LostEpisode(episode, self.episode, steps=rng.randrange(_STEPS + 1))
        return await super().play_episode(episode, conversation)


class _VoidableEpisode(WrappedEpisode):
    """An episode that fails when its agent ends the guest."""

    async def step(self, *actions: Action, **options: Any) -> StepResult:
        try:
            result = await super().step(*actions, **options)
        except GuestEnded as error:
            raise EscapeLost(str(error)) from error
        if result.end_reason == GUEST_ENDED:
            raise EscapeLost(f"episode {self.episode_id}: {result.guest_end_cause}")
        return result


class _LostEpisode(WrappedEpisode):
    """An episode whose machine is lost before a step, or before the evaluation if there are fewer."""

    def __init__(self, episode: AgentEpisode, machine: AsyncEpisode, *, steps: int) -> None:
        super().__init__(episode)
        self._machine = machine
        self._steps_left = steps if steps < _STEPS else -1

    async def step(self, *actions: Action, **options: Any) -> StepResult:
        if self._steps_left == 0:
            await self._lose()
        self._steps_left -= 1
        return await super().step(*actions, **options)

    async def evaluate(self, **options: Any) -> Evaluation:
        await self._lose()

    async def _lose(self) -> NoReturn:
        await self._machine.close()
        raise MachineLost(f"episode {self._machine.episode_id}: its host lost the machine (injected)")


def _rng(args: Any, sample: Any) -> random.Random:
    # Not a secret; the same samples fail in both ways of counting.
    return random.Random(f"{args.rollout_seed}/{sample.index}")
