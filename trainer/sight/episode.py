"""An episode whose screens are given pictures, for `play_episode`; it needs no daemon and no machine."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from cuaenv.client import Action, Checkpoint, Click, Evaluation, Observation, Origin, State, StepResult, View
from cuaenv.frames import TiledImage
from trainer.agent.grammars import Grammar, Intent, Parsed, Picture
from trainer.agent.settings import AgentSettings
from trainer.agent.starts import task_id_of
from trainer.sight.check import MOST_TURNS, SightPlan

#: Least turns of an episode: enough that pictures can be lost after the first one, or exchanged among later ones.
_LEAST_TURNS = 3
#: Enough for a code word in any grammar, and short enough for a check before each job.
_REPLY_TOKENS = 48
_INSTRUCTION = "The screen shows a code word. Type the code word that it shows now."
_SCREEN_PX = (1280, 800)


class PictureEpisode:
    """Each step shows the next picture. See `trainer.agent.loop.AgentEpisode`."""

    episode_id = "sight"
    task_id = "sight"
    instruction = _INSTRUCTION
    tools: tuple[str, ...] = ()
    origin = Origin(template_digest="", overlay_parent="", first_frame_id="")

    def __init__(self, pictures: Sequence[Image.Image]) -> None:
        """Show the first picture."""
        self._observations = [_observation(picture) for picture in pictures]
        self._shown = 0
        self.observation = self._observations[0]
        """The screen."""

    async def step(self, *actions: Action, view: View | None = None, timeout: timedelta | None = None) -> StepResult:  # noqa: ARG002 -- the protocol's
        """Show the next picture, or the last one again."""
        self._shown = min(self._shown + 1, len(self._observations) - 1)
        self.observation = self._observations[self._shown]
        return StepResult(
            observation=self.observation,
            action_errors=("",) * len(actions),
            state=State.ACTIVE,
            end_reason="",
            step_count=self._shown,
            timings_ms={},
            screen_change=None,
            replayed=False,
        )

    async def evaluate(self, *, timeout: timedelta | None = None) -> Evaluation:  # noqa: ARG002 -- the protocol's
        """Return a score of 0: nothing is learnt from it."""
        return Evaluation(score=0.0, checks=(), timings_ms={})

    async def close(self) -> None:
        """Do nothing: it has no machine."""


def _observation(picture: Image.Image) -> Observation:
    tiles = TiledImage.from_rgb(np.asarray(picture.convert("RGB")))
    width, height = picture.size
    return Observation(
        frame_id=tiles.image_id,
        image_id=tiles.image_id,
        width_px=width,
        height_px=height,
        screen_width_px=width,
        screen_height_px=height,
        capture_time=datetime.now(UTC),
        tiles=tiles,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ActingSettings(AgentSettings):
    """Settings by which every reply acts, whatever the model samples: models that cannot act reach their next turn too.

    Rows keep the sampled tokens and log-probabilities.
    """

    def make_grammar(self, offered: Sequence[str] | None = None) -> Grammar:
        return _acting(AgentSettings.make_grammar(self, offered))


def _acting(inner: Grammar) -> Grammar:
    """Return a grammar with the same prompt, by which every reply is a click."""
    click = inner.render([Click(1, 1)])

    class Acting(Grammar):
        name, coordinates = inner.name, inner.coordinates
        stop, takes_tools = inner.stop, inner.takes_tools

        def instructions(self, picture: Picture) -> str:
            return inner.instructions(picture)

        def read(self, text: str, picture: Picture) -> Sequence[Intent]:
            return inner.read(text, picture)

        def write(self, actions: Sequence[Action]) -> str:
            return inner.write(actions)

        def parse(self, text: str, picture: Picture) -> Parsed:  # noqa: ARG002 -- whatever it says
            return inner.parse(click, picture)

    return Acting({})


def settings_of(agent: AgentSettings) -> AgentSettings:
    """Return the settings of such an episode: those of the job, with short turns, and pictures alone."""
    given = {each.name: getattr(agent, each.name) for each in fields(AgentSettings)}
    reply_tokens = min(agent.reply_tokens, _REPLY_TOKENS)
    alone = {"a11y_tree": False, "terminal": False, "marks": False}
    return _ActingSettings(**{**given, **alone, "max_turns": _turn_count(agent), "reply_tokens": reply_tokens})


@lru_cache(maxsize=1)
def plan_of(agent: AgentSettings) -> SightPlan:
    """Return a job's code words, in pictures of the size of its screenshots of a screen of 1280x800 pixels."""
    unit, (width, height) = agent.image_multiple_px, _SCREEN_PX
    scale = min(1.0, (agent.image_max_pixels / (width * height)) ** 0.5)
    size_px = int(width * scale) // unit * unit, int(height * scale) // unit * unit
    return SightPlan.draw(turns=_turn_count(agent), size_px=size_px)


def _turn_count(agent: AgentSettings) -> int:
    """Return as many turns as a row of the job has pictures, within bounds: an engine may limit their number."""
    return max(_LEAST_TURNS, min(agent.row_cost.images, MOST_TURNS))


class PictureEnvironments:
    """Opens the episodes of a plan as tasks `sight/N`. See `trainer.agent.attempts.Environments`."""

    def __init__(self, plan: SightPlan) -> None:
        """Take the plan."""
        self._plan = plan

    async def reset(self, task: str | Checkpoint, **_: object) -> PictureEpisode:
        """Open an episode."""
        return PictureEpisode(self._plan.episodes[int(task_id_of(task).removeprefix("sight/"))])


def tokens_of(processor: Any) -> dict[str, Any]:
    """Return the arguments of `trainer.sight.check.turns_of_row` that a transformers processor determines."""
    tokenizer = processor.tokenizer
    return {"image_id": tokenizer.convert_tokens_to_ids(processor.image_token), "decode": tokenizer.decode}
