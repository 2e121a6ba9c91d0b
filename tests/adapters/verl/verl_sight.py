"""Do verl's engine and learner see the pixels of every turn? May be copied; see docs/train-watch.md."""

from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from trainer.adapters.verl import DesktopAgentLoop
from trainer.agent.attempts import Environments
from trainer.sight.check import SampledReply, turns_of_row
from trainer.sight.episode import PictureEnvironments, plan_of, settings_of, tokens_of


class SightAgentLoop(DesktopAgentLoop):
    """Checks that engine and rows have the pixels of every turn; see `trainer.sight.check`.

    Rows of tasks `sight/N` play the pictures of `trainer.sight.episode.plan_of(settings).episodes[N]`, greedily and
    without a daemon. `turns_of` returns the turns of each.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Check the configuration, as `DesktopAgentLoop` does. Raises: InputError."""
        super().__init__(*arguments, **options)
        self._plan = plan_of(self._config.agent)
        self._config = self._config.model_copy(update={"agent": settings_of(self._config.agent)})

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play the episode of a row. Raises: those of `DesktopAgentLoop.run`."""
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
        return await super().run({**sampling_params, **greedy}, **row)

    def _environments(self, group: object) -> Environments:
        return PictureEnvironments(self._plan)


def turns_of(row: Mapping[str, Any], processor: Any) -> list[SampledReply]:
    """Return the turns of a row that verl hands its learner, a batch of one, for `trainer.sight.check.compare`."""
    names = ("prompts", "responses", "response_mask", "rollout_log_probs")
    prompt, response, mask, log_probs = (row[name][0].tolist() for name in names)
    inputs = dict(row["multi_modal_inputs"][0].items()) if "multi_modal_inputs" in row.keys() else {}  # noqa: SIM118 -- tensordict
    return turns_of_row([*prompt, *response], mask, log_probs, inputs, **tokens_of(processor))
