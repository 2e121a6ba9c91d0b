"""A model behind SGLang's own `/generate`, read by the same rows of token ids as in training.

Where `trainer.evaluate.chat` leaves the chat template to the server, here it is the checkpoint's own, applied by the
code that training runs: what the model reads is what it was trained on, id by id.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.agent.settings import AgentSettings
from trainer.agent.types import Conversation
from trainer.evaluate.chat import Sampling
from trainer.evaluate.endpoint import Endpoint, EndpointError
from trainer.tokens.chat import Chat
from trainer.tokens.sglang import Room, SglangConversation


def load_chat(checkpoint: Path) -> Chat:
    """Return how a checkpoint's model reads.

    Raises:
        EndpointError: transformers is not installed, or the checkpoint has no tokenizer.
    """
    try:
        from transformers import AutoProcessor, AutoTokenizer  # noqa: PLC0415 -- who uses chat completions needs none
    except ImportError as error:
        raise EndpointError("a checkpoint's own chat template needs transformers: pip install transformers") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        has_eyes = (checkpoint / "preprocessor_config.json").is_file()
        return Chat(tokenizer, AutoProcessor.from_pretrained(checkpoint) if has_eyes else None)
    except (OSError, ValueError) as error:
        raise EndpointError(f"checkpoint {checkpoint} cannot be read: {error}") from error


def native_converse(
    endpoint: Endpoint, chat: Chat, *, settings: AgentSettings, sampling: Sampling
) -> Callable[[int], Conversation]:
    """Return what makes a conversation for an attempt's seed.

    Args:
        endpoint: SGLang's base URL, without `/v1`.
        chat: How the model reads.
        settings: Budgets of a row.
        sampling: `more` goes into `sampling_params`.
    """
    cost = settings.row_cost
    room = Room(
        prompt=settings.prompt_tokens + cost.image + cost.tree,
        reply=settings.reply_tokens,
        total=settings.context_tokens,
        images=cost.images,
    )

    async def ask(payload: Mapping[str, Any]) -> Mapping[str, Any]:
        return await endpoint.post("/generate", payload)

    def converse(seed: int) -> Conversation:
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "sampling_seed": seed,
            # As in training: what ends a reply is a part of it.
            "no_stop_trim": True,
            "skip_special_tokens": False,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            **sampling.more,
        }
        return SglangConversation(chat, ask, room=room, sampling_params=params, is_aborted=lambda: False)

    return converse
