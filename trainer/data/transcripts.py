"""Conversations as plain texts with a placeholder for each image: what recordings write, and what exports read."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.agent.coordinates import NORMALISED, Picture
from trainer.agent.grammars import Grammar
from trainer.agent.types import Message, data_uri
from trainer.config import InputError
from trainer.replay.trajectory import IMAGE_PLACEHOLDER, StoredTrajectory, image_bytes

#: Magic numbers of the image formats of screenshots.
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}


class Unusable(Exception):
    """An episode gives no trajectory of the wanted kind; the message has the reason."""


def with_message(
    trajectory: StoredTrajectory, message: Message, *, trained: bool = False, source: str = ""
) -> StoredTrajectory:
    """Return a trajectory with one more message, of the agent's loop.

    Args:
        trajectory: The messages before it.
        message: The message.
        trained: Whether it is a reply that is to be trained.
        source: Who acted in a reply, `agent` or `human`; empty if that is not recorded.
    """
    content = "".join(part if isinstance(part, str) else IMAGE_PLACEHOLDER for part in message.parts)
    entry: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant" and not trained:
        entry["step_loss_mask"] = 0
    if source:
        entry["source"] = source
    images = (data_uri(part, compress_level=6) for part in message.parts if not isinstance(part, str))
    return replace(trajectory, messages=(*trajectory.messages, entry), images=(*trajectory.images, *images))


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a stored message is a reply that is to be trained."""
    return bool(message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1)


def transcript_of(trajectory: StoredTrajectory) -> StoredTrajectory:
    """Return a trajectory whose contents are texts with `<image>` for each image, and whose images are data URIs.

    Raises:
        InputError: The numbers of images and placeholders differ, or an image has an unknown format.
    """
    given = iter(trajectory.images)
    images: list[str] = []
    messages = [
        {**message, "content": "".join(_texts(message["content"], given, images))} for message in trajectory.messages
    ]
    surplus = len(list(given))
    if surplus:
        raise InputError(f"{surplus} of {len(trajectory.images)} images have no placeholder in the messages")
    return replace(trajectory, messages=tuple(messages), images=tuple(images))


def _texts(content: str | Sequence[Any], given: Iterator[str], images: list[str]) -> Iterator[str]:
    """Yield the texts of a message, and move its images from `given` to `images`."""
    if isinstance(content, str):
        for _ in range(content.count(IMAGE_PLACEHOLDER)):
            images.append(_data_uri(next(given, None)))
        yield content
        return
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                if IMAGE_PLACEHOLDER in text:
                    raise InputError(f"a text part contains {IMAGE_PLACEHOLDER}; images need parts of their own")
                yield text
            case {"type": "image", "image": str(image)} if image:
                images.append(_data_uri(image))
                yield IMAGE_PLACEHOLDER
            case {"type": "image"}:
                images.append(_data_uri(next(given, None)))
                yield IMAGE_PLACEHOLDER
            case _:
                raise InputError(f"a part of a message is neither text nor image: {str(part)[:60]}")


def _data_uri(image: str | None) -> str:
    if image is None:
        raise InputError("the messages have more placeholders than images")
    data = image_bytes(image)
    kind = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), None)
    if kind is None:
        raise InputError(f"an image of {len(data)} bytes is not a PNG, JPEG or WebP")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def unparsable_turns(transcript: StoredTrajectory, grammar: Grammar) -> dict[int, str]:
    """Return the indices of the model's messages that do not follow the grammar strictly, with the reasons."""
    # Strict parsing uses the picture only for points relative to the pointer, never its size.
    picture = Picture(NORMALISED + 1, NORMALISED + 1, pointer=(0, 0))
    problems: dict[int, str] = {}
    for index, turn in enumerate(transcript.messages):
        if turn["role"] == "assistant":
            parsed = grammar.parse(turn["content"], picture)
            if not parsed.parsed:
                problems[index] = parsed.error or f"only the fallback {parsed.fallback} parses it"
    return problems
