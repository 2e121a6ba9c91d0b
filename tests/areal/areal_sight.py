"""Do AReaL's engine and learner see the pixels of every turn? May be copied; see docs/train-watch.md."""

from collections.abc import Mapping
from typing import Any

from trainer.adapters.areal.workflow import DesktopWorkflow
from trainer.agent.attempts import Environments
from trainer.sight.check import SampledReply, turns_of_row
from trainer.sight.episode import PictureEnvironments, plan_of, settings_of, tokens_of


class SightWorkflow(DesktopWorkflow):
    """Checks that engine and rows have the pixels of every turn; see `trainer.sight.check`.

    Plays the pictures of `plan` greedily as tasks `sight/N`, without a daemon.
    """

    def __init__(self, *, gconfig: Any, **options: Any) -> None:
        """Check the configuration, as `DesktopWorkflow` does. Raises: InputError."""
        super().__init__(gconfig=gconfig.new(greedy=True), **options)
        self.plan = plan_of(self._config.agent)
        """The pictures."""
        own = {"agent": settings_of(self._config.agent), "group": "fork", "credit": "returns", "group_size": 1}
        self._config = self._config.model_copy(update=own)

    async def episodes(self, engine: Any) -> list[list[SampledReply]]:
        """Return the turns of each episode of the plan, from AReaL's batches; a void one has none."""
        tasks = [{self._config.task_key: f"sight/{number}"} for number in range(len(self.plan.episodes))]
        return [self._turns_of(await self.arun_episode(engine, task) or {}) for task in tasks]

    def _turns_of(self, batch: Mapping[str, Any]) -> list[SampledReply]:
        turns = list[SampledReply]()
        for number, width in enumerate(batch["attention_mask"].sum(dim=1).tolist() if batch else ()):
            names = ("input_ids", "loss_mask", "logprobs")
            tokens, mask, log_probs = (batch[name][number, :width].tolist() for name in names)
            inputs = (batch.get("multi_modal_input") or {number: None})[number]
            turns += turns_of_row(tokens, mask, log_probs, inputs, **tokens_of(self._processor))
        return turns

    def _environments(self) -> Environments:
        return PictureEnvironments(self.plan)
