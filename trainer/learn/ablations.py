"""What an ablation changes in a rollout: machines that are lost, and groups whose members start in other states.

A machine is lost between two turns or before the evaluation, and the loop handles it as one that its host lost.
`faults_as_zero` then counts the episode as a failure of the policy. `escapes_as_void` does the opposite: a guest that
its agent ended counts as one that its host lost.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NoReturn

from cuaenv.client import Action, AsyncEpisode, Checkpoint, Evaluation, GuestEnded, MachineLost, StepResult
from trainer.agent.loop import AgentEpisode
from trainer.agent.ownership import GUEST_ENDED
from trainer.agent.types import Outcome, Trajectory
from trainer.data.split import template_id
from trainer.slime.job import job_of
from trainer.slime.play.environments import SampleEnvironments, WrappedEpisode
from trainer.slime.play.rollout import Rollout

__all__ = ["EscapeLost", "generate", "shares_of_all"]

#: A machine is lost before one of so many first steps, or before the evaluation.
_STEPS = 3


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run a sample as the settings of the ablation say; evaluations run unchanged."""
    if evaluation:
        return await job_of(args).run(args, sample, sampling_params, evaluation=True)
    if args.group_start == "drawn":
        seed = _rng(args, sample).randrange(args.train_seeds)
        sample.metadata["task_id"] = f"{template_id(sample.metadata['task_id'])}?seed={seed}"
    return await job_of(args).run(args, sample, sampling_params, rollout_type=_FaultyRollout)


class EscapeLost(MachineLost):
    """The agent ended its guest, and the episode is void as if the host had lost it."""


def shares_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of all episodes, void ones included, that solved their task and that ended their guest."""
    if not facts:
        return {}
    escapes = [bool(each.get("guest_end_cause")) or each.get("void") == EscapeLost.__name__ for each in facts]
    return {"solved_frac": fmean(each.get("task_score", 0) >= 1 for each in facts), "escape_frac": fmean(escapes)}


class _FaultyRollout(Rollout):
    """A rollout whose machine is lost with a probability of `args.fault_share`."""

    async def run(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        trajectory = await super().run(start, group_size=group_size)
        is_lost = trajectory is not None and isinstance(trajectory.error, MachineLost)
        if trajectory is None or not is_lost or not self.args.faults_as_zero or not self.rows:
            return trajectory
        zero = Evaluation(score=0.0, checks=(), timings_ms={})
        return replace(trajectory, outcome=Outcome.TRUNCATED, reason="injected", error=None, evaluation=zero)

    def wrap(self, environments: SampleEnvironments, episode: AgentEpisode) -> AgentEpisode:
        if self.args.escapes_as_void:
            episode = _VoidableEpisode(episode)
        rng = _rng(self.args, self.sample)
        if rng.random() >= self.args.fault_share or environments.episode is None:
            return episode
        return _LostEpisode(episode, environments.episode, steps=rng.randrange(_STEPS + 1))


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

    async def evaluate(self, **options: Any) -> Evaluation:  # noqa: ARG002 - nothing is left to evaluate
        await self._lose()

    async def _lose(self) -> NoReturn:
        await self._machine.close()
        raise MachineLost(f"episode {self._machine.episode_id}: its host lost the machine (injected)")


def _rng(args: Any, sample: Any) -> random.Random:
    # Not a secret; the same samples fail in both ways of counting.
    return random.Random(f"{args.rollout_seed}/{sample.index}")  # noqa: S311
