"""A model behind OpenAI's chat completions: vLLM, SGLang and hosted ones.

The server applies the model's chat template. No tools are declared, so a reply comes as the text that the model wrote,
and the parser of training reads it.
"""

import asyncio
import base64
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from trainer.agent.types import Message, ModelFailed, Reply
from trainer.evaluate.endpoint import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How replies are sampled."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    max_reply_tokens: int = 512
    stop: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as `{"top_k": 20}`, for what one kind of server knows."""


class ChatConversation:
    """One episode's side of an endpoint; a `trainer.agent.types.Conversation`."""

    def __init__(self, endpoint: Endpoint, *, model: str, sampling: Sampling, seed: int | None = None) -> None:
        """Begin without a row; `seed` is sent along where it is given."""
        self._endpoint = endpoint
        self._model = model
        self._sampling = sampling
        self._seed = seed
        self._messages: list[dict[str, Any]] = []

    async def begin(self, messages: Sequence[Message]) -> None:
        """Start a new row with these messages."""
        self._messages = [await asyncio.to_thread(_wire_message, message) for message in messages]

    async def append(self, message: Message) -> None:
        """Add an observation to the row."""
        self._messages.append(await asyncio.to_thread(_wire_message, message))

    async def generate(self) -> Reply:
        """Ask for a reply and add it to the row. Raises: BudgetExhausted, ModelFailed."""
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": sampling.max_reply_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            **({} if self._seed is None else {"seed": self._seed}),
            **sampling.more,
        }
        start_s = time.monotonic()
        answer = await self._endpoint.post("/chat/completions", body)
        reply = read_answer(answer, elapsed_s=time.monotonic() - start_s)
        self._messages.append({"role": "assistant", "content": reply.text})
        return reply


def read_answer(answer: Mapping[str, Any], *, elapsed_s: float) -> Reply:
    """Return the reply in a chat completion.

    Raises:
        ModelFailed: It holds none, or one that the server has taken apart.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text, is_taken_apart = message.get("content") or "", bool(message.get("tool_calls"))
        finish = choice.get("finish_reason")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelFailed(f"the endpoint's answer is no chat completion: {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise ModelFailed(f"the endpoint's answer holds a {type(text).__name__} where its text should be")
    if is_taken_apart:
        raise ModelFailed("the endpoint parsed a tool call out of the reply; start the server without a tool parser")
    return Reply(text=text, finish="length" if finish == "length" else "stop", elapsed_s=elapsed_s)


def _wire_message(message: Message) -> dict[str, Any]:
    if all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": "".join(str(part) for part in message.parts)}
    return {"role": message.role, "content": [_wire_part(part) for part in message.parts]}


def _wire_part(part: str | Image.Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_uri(part)}}


def data_uri(image: Image.Image) -> str:
    """Return an image as a PNG in a data URI: lossless, as the model was trained on."""
    buffer = io.BytesIO()
    # The least compression is the fastest by far.
    image.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
