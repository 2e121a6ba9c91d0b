"""Episodes of the check in our loop: the plan's pictures in order, whatever the model replies."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from trainer.agent.attempts import play_task
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message, Reply
from trainer.sight.check import MOST_TURNS
from trainer.sight.episode import PictureEnvironments, plan_of, settings_of

SETTINGS = AgentSettings(image_max_pixels=36_864, prompt_tokens=4096, max_turns=8, a11y_tree=True)
PLAN = plan_of(SETTINGS)
TURNS = 8


class Mute:
    """A conversation whose model cannot act."""

    def __init__(self) -> None:
        self.seen: list[Image.Image] = []

    async def begin(self, messages: Sequence[Message]) -> None:
        for message in messages:
            await self.append(message)

    async def append(self, message: Message) -> None:
        self.seen += [part for part in message.parts if not isinstance(part, str)]

    async def generate(self) -> Reply:
        return Reply(text="no action")


def shown(conversation: Mute) -> list[int]:
    """Return the places of the pictures in the plan's fourth episode."""
    planned = [np.asarray(picture) for picture in PLAN.episodes[3]]
    return [
        next(number for number, each in enumerate(planned) if np.array_equal(each, np.asarray(picture)))
        for picture in conversation.seen
    ]


async def test_every_turn_shows_the_next_picture_to_a_model_that_cannot_act() -> None:
    conversation = Mute()
    trajectory = await play_task(
        PictureEnvironments(PLAN), "sight/3", lambda: conversation, settings=settings_of(SETTINGS)
    )
    assert (trajectory.reason, len(trajectory.turns)) == ("turns", TURNS)
    assert [turn.reply.text for turn in trajectory.turns] == ["no action"] * TURNS
    assert shown(conversation) == list(range(TURNS))


def test_an_episode_has_as_many_turns_as_a_row_has_pictures() -> None:
    def count(max_turns: int, *, images_per_row: int = SETTINGS.images_per_row) -> int:
        settings = replace(SETTINGS, a11y_tree=False, max_turns=max_turns, images_per_row=images_per_row)
        return len(plan_of(settings).words[0])

    assert (count(1), count(12), count(30)) == (3, 12, MOST_TURNS)
    assert count(30, images_per_row=5) == 5
