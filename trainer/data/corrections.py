"""What people did in recorded episodes, as training data: demonstrations, and preferences over what the agent did.

Input are files of `envd episodes export --format jsonl`. An episode that a person opened from a checkpoint continues
the agent's: the steps before the checkpoint are its context, and the person's half is preferred to the agent's. Each
step says who acted in it (`source`), and only the replies of one half are trained.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuaenv.action_codec import BadAction, from_json
from cuaenv.client import Action, Done, ToolResult
from cuaenv.frames.size import fit
from trainer.agent import prompts
from trainer.agent.coordinates import CoordinateSpace, to_model_points
from trainer.agent.grammars import Parsed, UnsupportedAction, split_actions
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message
from trainer.config import InputError
from trainer.data.transcripts import Unusable, with_message
from trainer.replay.trajectory import StoredTrajectory, image_bytes

if TYPE_CHECKING:
    from PIL import Image

HUMAN, AGENT = "human", "agent"


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step of an episode."""

    index: int
    source: str
    actions: tuple[Action, ...]
    outputs: tuple[str | None, ...]
    """Results of tools, in the order of the actions."""
    screen: str
    """The screen after it, as a data URI."""
    is_rolled_back: bool
    time_s: float = 0.0
    """End of the step, in Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """A recorded episode."""

    facts: Mapping[str, Any]
    steps: tuple[RecordedStep, ...]

    @property
    def score(self) -> float | None:
        """Its score; None if it has none."""
        return self.facts.get("score")

    @property
    def first_step(self) -> int:
        """The number of steps before its checkpoint; 0 without one."""
        return int(self.facts.get("first_step", 0))

    def continues(self, step: RecordedStep) -> bool:
        """Whether a step of the episode of its checkpoint was before that checkpoint.

        A person's step has the index of the agent's next one.
        """
        checkpoint_s = float(self.facts.get("checkpoint_time") or 0.0)
        is_persons = step.source == HUMAN and step.index == self.first_step and step.time_s <= checkpoint_s
        return not step.is_rolled_back and (step.index < self.first_step or is_persons)


def read_episode(path: Path) -> RecordedEpisode:
    """Read an exported episode. Raises: InputError: The file is not one. OSError: It cannot be read."""
    try:
        facts, *steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        recorded = tuple(_step(step) for step in steps)
        facts |= {name: str(facts[name]) for name in ("episode_id", "task_id", "instruction", "screen")}
    except (ValueError, TypeError, LookupError, BadAction) as error:
        raise InputError(f"{path}: not an export of `envd episodes export --format jsonl`: {error}") from error
    return RecordedEpisode(facts=facts, steps=recorded)


def _step(step: Mapping[str, Any]) -> RecordedStep:
    return RecordedStep(
        index=int(step["index"]),
        source=str(step["source"]),
        actions=tuple(from_json(action) for action in step["performed"]),
        outputs=tuple(step.get("outputs", ())),
        screen=str(step["screen"]),
        is_rolled_back=bool(step.get("rolled_back")),
        time_s=float(step.get("time", 0.0)),
    )


class Corrections:
    """Recorded episodes by id, and the data that they give."""

    def __init__(self, episodes: Sequence[RecordedEpisode], settings: AgentSettings) -> None:
        """Use the prompts, the grammar and the picture size of the settings; a conversation is one row."""
        self._episodes = {str(each.facts["episode_id"]): each for each in episodes}
        self._settings = settings
        self._grammar = settings.make_grammar()

    def demonstration(self, episode: RecordedEpisode) -> StoredTrajectory:
        """Return an episode in which a person acted; the person's replies are trained. Raises: Unusable."""
        start, before = self._before(episode)
        own = [step for step in episode.steps if not step.is_rolled_back]
        if not any(step.source == HUMAN for step in own):
            raise Unusable("no person acted in it")
        if episode.score is None:
            raise Unusable("it has no score")
        if own[-1].source == HUMAN:
            own.append(RecordedStep(own[-1].index, HUMAN, (Done(),), (), own[-1].screen, is_rolled_back=False))
        return self._trajectory(episode, start, [*before, *own], HUMAN, first=0)

    def preference(self, episode: RecordedEpisode) -> dict[str, Any]:
        """Return a person's half and the agent's from one checkpoint, as two trajectories that begin alike.

        `shared_messages` is the number of messages before the halves.

        Raises:
            Unusable: There are no two halves, or the person's has not the better score.
        """
        rival = self._episodes.get(str(episode.facts.get("checkpoint_episode_id") or ""))
        if rival is None:
            raise Unusable("it did not begin in a checkpoint of another given episode")
        chosen = self.demonstration(episode)
        if rival.score is not None and (episode.score or 0.0) <= rival.score:
            raise Unusable(f"it scored {episode.score:g}, the agent {rival.score:g}")
        start, before = self._before(episode)
        later = [step for step in rival.steps if step.index >= episode.first_step and step.source == AGENT]
        kept = [step for step in later if not step.is_rolled_back] or later
        if not kept:
            raise Unusable("the agent did nothing after the checkpoint")
        rejected = self._trajectory(rival, start, [*before, *kept], AGENT, first=len(before))
        return {
            "task_id": chosen.task_id,
            "shared_messages": 2 + 2 * len(before),
            "chosen": chosen.as_row(),
            "rejected": rejected.as_row(),
        }

    def _before(self, episode: RecordedEpisode) -> tuple[str, list[RecordedStep]]:
        """Return the first screen, and the steps of earlier episodes up to the checkpoint that it began in."""
        parent = self._episodes.get(str(episode.facts.get("checkpoint_episode_id") or ""))
        if parent is None:
            return episode.facts["screen"], []
        start, before = self._before(parent)
        return start, before + [step for step in parent.steps if episode.continues(step)]

    def _trajectory(
        self, episode: RecordedEpisode, start: str, steps: Sequence[RecordedStep], trained: str, *, first: int
    ) -> StoredTrajectory:
        """Return a conversation in which the replies of one source are trained, from a first step on."""
        settings, facts = self._settings, episode.facts
        screens = [_scaled(screen, settings) for screen in (start, *(step.screen for step in steps[:-1]))]
        offered = tuple(map(str, facts.get("tools", ())))
        picture, screen_px = screens[0]
        space = CoordinateSpace.of(settings.units, image_px=picture.size, screen_px=screen_px)
        made = StoredTrajectory(
            task_id=facts["task_id"],
            messages=(),
            reward=0.0 if episode.score is None else episode.score,
            metadata={
                "instruction": facts["instruction"],
                "episode_id": facts["episode_id"],
                "source": trained,
                "grammar": settings.grammar,
                "prompt_hash": prompts.prompt_hash(settings),
            },
        )
        made = with_message(made, prompts.system_message(settings, space.picture(), offered=offered))
        made = with_message(made, prompts.task_message(facts["instruction"], _observed(picture), settings))
        for number, step in enumerate(steps):
            if number:
                parsed = self._grammar.parse(made.messages[-1]["content"], space.picture())
                result, (picture, _) = _result(steps[number - 1], parsed, settings), screens[number]
                made = with_message(made, prompts.observation_message(result, _observed(picture)))
            is_trained = step.source == trained and number >= first
            reply = Message("assistant", (self._reply(step, space),))
            made = with_message(made, reply, trained=is_trained, source=step.source)
        return made

    def _reply(self, step: RecordedStep, space: CoordinateSpace) -> str:
        actions = [to_model_points(action, space) for action in step.actions]
        try:
            return self._grammar.render(actions)
        except UnsupportedAction:
            try:
                return self._grammar.render([part for action in actions for part in split_actions(action)])
            except UnsupportedAction as error:
                raise Unusable(f"step {step.index}: {error}") from error


def _result(step: RecordedStep, reply: Parsed, settings: AgentSettings) -> str:
    # Results are those of all actions; actions that were refused were not performed.
    outputs = step.outputs if len(step.outputs) == len(step.actions) else ()
    results = [None if output is None else ToolResult(output=output) for output in outputs]
    tools = prompts.tool_text([each.facts.kind for each in reply.intents], results, max_chars=settings.tool_chars)
    text = prompts.result_text()
    return f"{text}\n\n{tools}\n\n" if tools else text


def _scaled(screen: str, settings: AgentSettings) -> "tuple[Image.Image, tuple[int, int]]":
    """Return a screen as the model sees it, and its size in the guest's pixels. Raises: Unusable."""
    from PIL import Image  # noqa: PLC0415 -- most commands need no pictures

    try:
        picture = Image.open(io.BytesIO(image_bytes(screen))).convert("RGB")
        size = fit(*picture.size, max_pixel_count=settings.image_max_pixels, multiple_px=settings.image_multiple_px)
    except (OSError, ValueError) as error:
        raise Unusable(f"a screen is unusable: {error}") from error
    return picture.resize(size, Image.Resampling.BICUBIC), picture.size


def _observed(picture: "Image.Image") -> prompts.ModelObservation:
    return prompts.ModelObservation(image=picture, image_id="", tree=None, terminal=None, boxes_px=())
