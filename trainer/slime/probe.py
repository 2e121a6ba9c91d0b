"""Find out, once per process and engine, whether the engine keeps the ids of prompts with images.

An engine that decodes them and tokenises the text again reads other ids wherever a sampled reply is not what its text
tokenises to. Each such sample is void (`PromptMismatch`); those that stay are a biased selection.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from PIL import Image

from trainer.agent.types import BudgetExhausted, Message, ModelFailed, data_uri
from trainer.slime.once import once
from trainer.tokens.chat import Chat
from trainer.tokens.sglang import Engine

logger = logging.getLogger(__name__)
#: Has fewer tokens than characters in the vocabulary of any model that uses computers.
_TEXT = "the screen of the computer"
_SIDE_PX = 64


async def warn_of_engine(engine: Engine, url: str, chat: Chat) -> None:
    """Send one probe, and warn if the engine read other ids than it was sent. Does nothing once it answered.

    Args:
        engine: Calls the engine.
        url: Its address, for the warning.
        chat: The model's chat format.
    """
    if chat.image_id is not None:
        await once(("probe", url), lambda: _probed(engine, url, chat))


async def _probed(engine: Engine, url: str, chat: Chat) -> bool:
    """Send a probe; return whether the engine answered, or needs none."""
    try:
        request, expected = await asyncio.to_thread(_probe, chat)
        if request is None:
            return True
        read = (await engine(request))["meta_info"]["prompt_tokens"]
    except (BudgetExhausted, ModelFailed, KeyError, TypeError):
        return False  # the first episode reports the error
    if read != expected:
        logger.warning(
            "[envd] engine %s: it tokenises prompts with images again (%s tokens instead of %d); samples with other ids"
            " are void (envd/void/PromptMismatch). Patch the engine: docs/train.md, section The engine",
            url,
            read,
            expected,
        )
    return True


def _probe(chat: Chat) -> tuple[Mapping[str, Any] | None, int]:
    """Return a request whose ids are not those of its text, and its number of tokens.

    The request is None if the vocabulary has no such ids for our text.
    """
    image = Image.new("RGB", (_SIDE_PX, _SIDE_PX))
    segment = chat.opening([Message("user", (image, "-"))])
    split = [token for character in _TEXT for token in chat.encode(character)]
    if len(split) == len(chat.encode(_TEXT)) or chat.decode(split) != _TEXT:
        return None, 0
    request = {
        "input_ids": [*segment.engine_ids, *split],
        "image_data": [data_uri(image).encode("ascii")],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }
    return request, len(segment.train_ids) + len(split)
