"""Find out, once per process and engine, whether the engine keeps the ids of prompts with images.

An engine that decodes them and tokenises the text again reads other ids wherever a sampled reply is not what its text
tokenises to. Each such sample is void (`PromptMismatch`); those that stay are a biased selection.
"""

import asyncio
import logging
from dataclasses import replace

from PIL import Image

from trainer.agent.types import BudgetExhausted, Message, ModelFailed
from trainer.slime.engine import SlimeEngine
from trainer.slime.guard import Halted
from trainer.slime.once import once
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)
#: Has fewer tokens than characters in the vocabulary of any model that uses computers.
_TEXT = "the screen of the computer"
_SIDE_PX = 64


async def warn_of_engine(engine: SlimeEngine, chat: Chat) -> None:
    """Send one probe, and warn if the engine read other ids than it was sent. Does nothing once it answered.

    Args:
        engine: The engine, which gets pictures in requests.
        chat: The model's chat format.
    """
    if chat.image_id is not None:
        await once(("probe", engine.url), lambda: _probed(engine, chat))


async def _probed(engine: SlimeEngine, chat: Chat) -> bool:
    """Send a probe; return whether the engine answered, or needs none."""
    try:
        row = await asyncio.to_thread(_probe, chat)
        if row is None:
            return True
        await asyncio.to_thread(engine.encode, row.images)
        read = (await engine.sample(row, limit=1)).prompt_tokens
    except (BudgetExhausted, ModelFailed):
        return False  # the first episode reports the error
    if read != row.token_count:
        logger.warning(
            "[envd] engine %s: it tokenises prompts with images again (%s tokens instead of %d); samples with other ids"
            " are void (envd/void/PromptMismatch). Patch the engine: docs/train.md, section The engine",
            engine.url,
            read,
            row.token_count,
        )
    return True


def _probe(chat: Chat) -> Row | None:
    """Return a row whose ids are not those of its text; None if the vocabulary has no such ids for our text."""
    image = Image.new("RGB", (_SIDE_PX, _SIDE_PX))
    segment = chat.opening([Message("user", (image, "-"))])
    split = tuple(token for character in _TEXT for token in chat.encode(character))
    if len(split) == len(chat.encode(_TEXT)) or chat.decode(split) != _TEXT:
        return None
    return Row(replace(segment, engine_ids=segment.engine_ids + split, train_ids=segment.train_ids + split))


async def require_readable(in_files: SlimeEngine, in_requests: SlimeEngine, chat: Chat, directory: str) -> None:
    """Check once per engine that it reads the files of a directory.

    Args:
        in_files: The engine, whose pictures are files of the directory.
        in_requests: The engine with pictures in its requests.
        chat: The model's chat format.
        directory: `envd.picture_dir`.

    Raises:
        Halted: It reads pictures in requests, but not in files.
        OSError: The directory cannot be written.
    """
    if chat.image_id is not None:
        await once((directory, in_files.url), lambda: _read(in_files, in_requests, chat, directory))


async def _read(in_files: SlimeEngine, in_requests: SlimeEngine, chat: Chat, directory: str) -> bool:
    """Return whether the engine reads files; False if it does not answer. Raises: Halted, OSError."""
    row = Row(chat.opening([Message("user", (Image.new("RGB", (_SIDE_PX, _SIDE_PX)), "-"))]))
    try:
        await asyncio.to_thread(in_files.encode, row.images)
        await in_files.sample(row, limit=1)
    except (BudgetExhausted, ModelFailed) as error:
        try:
            await asyncio.to_thread(in_requests.encode, row.images)
            await in_requests.sample(row, limit=1)
        except (BudgetExhausted, ModelFailed):
            return False  # the first episode reports the error
        raise Halted(
            f"envd.picture_dir {directory}: engine {in_files.url} does not read its files ({error}); share the"
            " directory with the engines, or remove the key"
        ) from error
    finally:
        in_files.close()
    return True
