"""A double of AReaL's inference engine with scripted replies."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support import slime
from trainer.adapters.areal.group import play_group
from trainer.agent.attempts import Environments
from trainer.agent.types import Outcome, Reply, Trajectory, Turn
from trainer.rewards.credit import CreditedMember
from trainer.rewards.facts import TurnFacts


@dataclass
class ModelResponse:
    """`areal.api.ModelResponse`: the fields that the trainer reads."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"


class ScriptedEngine(slime.ScriptedEngine):
    """Generates scripted replies."""

    def __init__(self, script: Callable[[str], str], *, response: Callable[..., Any] = ModelResponse) -> None:
        """Take the script, a function from the decoded prompt to the reply, and the class of responses."""
        super().__init__(script)
        self.version = 3
        self.misread = False
        """Whether it reports other ids than it was sent."""
        self._response = response

    async def ask(self, input_ids: list[int], images: list[str], limit: int) -> Any:
        """See `trainer.adapters.areal.engine.Ask`; if the script raises, the engine fails."""
        return self._respond(SimpleNamespace(input_ids=input_ids, images=images), input_ids, limit)

    async def agenerate(self, request: Any) -> Any:
        """Generate for an `areal.api.ModelRequest`."""
        return self._respond(request, request.input_ids, request.gconfig.max_new_tokens)

    def _respond(self, request: Any, input_ids: list[int], limit: int) -> Any:
        ids, log_probs, finish = self.generate(request, input_ids, limit)
        return self._response(
            input_tokens=input_ids[1:] if self.misread else list(input_ids),
            output_tokens=ids,
            output_logprobs=log_probs,
            output_versions=[self.version] * len(ids),
            stop_reason=finish,
        )


async def group_of(environments: Environments, row: Mapping[str, Any], engine: ScriptedEngine, **options: Any) -> Any:
    """Run a group with options of `play_group`; return its `rows`, and its `metrics` by name."""
    metrics: dict[str, list[float]] = defaultdict(list)
    rows = await play_group(
        environments, row, engine.ask, measured=lambda name, value: metrics[name].append(value), **options
    )
    return SimpleNamespace(rows=rows, metrics=metrics)


def played_of(member: CreditedMember) -> Trajectory:
    """Return the episode of a member of a group."""
    turn = Turn(reply=Reply(text=""), actions=(), facts=TurnFacts(text="", parsed=True), row=0)
    return Trajectory(
        task_id="task",
        instruction="",
        outcome=Outcome.TERMINATED,
        turns=(turn,) * member.turn_count,
        shared_turn_count=member.shared_count,
        episode_id=member.name,
        parent_episode_id=member.parent,
    )
