"""Published faults by which a policy does not see its pixels, for tests of `trainer sight` with each framework."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import pytest
from PIL import Image

from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message
from trainer.sight.check import Episode, Patches, Report, SightPlan, compare
from trainer.sight.model import SightModel
from trainer.tokens.chat import Chat

AGENT = {"image_max_pixels": 36_864, "max_turns": 3, "prompt_tokens": 4096, "reply_tokens": 12}
SETTINGS = AgentSettings.from_mapping(AGENT)
ALL, LATER = {1, 2, 3}, {2, 3}


@dataclass(frozen=True)
class Fault:
    """What is lost, and the turns with a finding by side; the other side has none."""

    found: dict[str, set[int]] = field(default_factory=dict)
    is_engine_blind: bool = False
    has_learner_inputs: bool = True
    has_batch_inputs: bool = True
    lost_turns: frozenset[int] = frozenset()


FAULTS = {
    "none": Fault(),
    "agent-lightning: the learner's forward pass gets no pixel_values": Fault(
        {"learner": ALL}, has_learner_inputs=False
    ),
    "NeMo-RL: requests lose their pictures": Fault({"engine": ALL}, is_engine_blind=True),
    "verifiers and prime-rl: the batch loses its tensors": Fault({"learner": ALL}, has_batch_inputs=False),
    "slime: pictures are lost after the first turn": Fault(
        {"engine": LATER, "learner": LATER}, lost_turns=frozenset(LATER)
    ),
    "verl: no side gets pictures": Fault({"engine": ALL, "learner": ALL}, lost_turns=frozenset(ALL)),
}


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Let chats lose the pictures of some turns."""
    opening, following = Chat.opening, Chat.following
    if 1 in fault.lost_turns:
        patch.setattr(Chat, "opening", lambda self, messages: opening(self, list(map(_without, messages))))
    if fault.lost_turns:
        patch.setattr(Chat, "following", lambda self, message, **more: following(self, _without(message), **more))


def plant_messages(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Let chats in OpenAI's form lose the pictures of some turns: prompts that have them start at message 1."""
    to_openai = Message.to_openai
    if fault.lost_turns:
        is_kept = 1 not in fault.lost_turns
        patch.setattr(
            Message, "to_openai", lambda self: to_openai(self if is_kept and _opens(self) else _without(self))
        )


def _opens(message: Message) -> bool:
    return any("code word" in part for part in message.parts if isinstance(part, str))


def _without(message: Message) -> Message:
    return Message(message.role, tuple(part for part in message.parts if isinstance(part, str)))


def reply(
    model: SightModel, fault: Fault, ids: Sequence[int], images: Sequence[Any], *, limit: int
) -> tuple[list[int], list[float]]:
    """Return the reply of an engine to ids with one placeholder for each image token."""
    if fault.is_engine_blind:
        return model.reply(ids, [], limit=limit)
    once = [each for token, run in groupby(ids) for each in ([token] if token == model.image_id else run)]
    return model.reply(once, images, limit=limit)


def picture_of(encoded: str) -> Image.Image:
    """Return a picture in base64."""
    return Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")


def examine(plan: SightPlan, episodes: Sequence[Episode], model: SightModel, fault: Fault) -> Report:
    """Compare engine and learner, which lose what the fault says."""
    if not fault.has_batch_inputs:
        episodes = [[replace(turn, inputs={}) for turn in episode] for episode in episodes]
    patches = Patches.of(model.processor.image_processor)
    return compare(
        plan,
        episodes,
        lambda tokens, inputs: model.log_probs(tokens, inputs if fault.has_learner_inputs else {}),
        patches,
    )


def check(report: Report, fault: Fault) -> None:
    """Assert that a fault is found, at its side and turns. The gap between both sides depends on random weights."""
    found: dict[str, set[int]] = {}
    for each in report.findings:
        found.setdefault(each.side, set()).add(each.turn)
    assert bool(found) == bool(fault.found), str(report)
    found.pop("engine and learner", None)
    assert found == fault.found, str(report)
