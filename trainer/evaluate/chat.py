"""Conversation with a server of OpenAI's chat completions: vLLM, SGLang or a hosted one.

The server applies the model's chat template. The request declares no tools, so a reply is the model's own text, which
the training parser reads.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.agent.types import Message, ModelFailed, Reply
from trainer.evaluate.endpoint import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    max_reply_tokens: int = 512
    stop: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the request, such as `{"top_k": 20}`."""


class ChatConversation:
    """A `trainer.agent.types.Conversation` of one episode with an endpoint."""

    def __init__(self, endpoint: Endpoint, *, model: str, sampling: Sampling, seed: int | None = None) -> None:
        """Create a conversation without a row. A `seed` is sent with each request."""
        self._endpoint = endpoint
        self._model = model
        self._sampling = sampling
        self._seed = seed
        self._messages: list[dict[str, Any]] = []

    async def begin(self, messages: Sequence[Message]) -> None:
        self._messages = [await asyncio.to_thread(message.to_openai) for message in messages]

    async def append(self, message: Message) -> None:
        self._messages.append(await asyncio.to_thread(message.to_openai))

    async def generate(self) -> Reply:
        """Request a reply and add it to the row.

        Raises:
            BudgetExhausted: The context is full, after at least one reply.
            ModelFailed: No usable reply, or the first prompt does not fit into the model's context.
        """
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
        response = await self._endpoint.post("/chat/completions", body)
        reply = read_completion(response, elapsed_s=time.monotonic() - start_s)
        self._messages.append(Message("assistant", (reply.text,)).to_openai())
        return reply


def read_completion(response: Mapping[str, Any], *, elapsed_s: float) -> Reply:
    """Return the reply in a chat completion.

    A server with a parser for reasoning moves all of a reply that has no end of reasoning out of `content`. It is the
    model's own text and is read as such, as in training.

    Raises:
        ModelFailed: It contains none, or the server parsed a tool call out of it.
    """
    try:
        choice = response["choices"][0]
        message = choice["message"]
        fields = ("content", "reasoning_content", "reasoning")
        text = next((message[name] for name in fields if message.get(name)), "")
        has_tool_calls = bool(message.get("tool_calls"))
        finish = choice.get("finish_reason")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelFailed(
            f"the endpoint's response is not a chat completion: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(text, str):
        raise ModelFailed(f"the endpoint's response has a {type(text).__name__} instead of text")
    if has_tool_calls:
        raise ModelFailed("the endpoint parsed a tool call out of the reply; start the server without a tool parser")
    # JSON can hold half of a surrogate pair, which no later request of this conversation could.
    text = text.encode(errors="replace").decode()
    return Reply(text=text, finish="length" if finish == "length" else "stop", elapsed_s=elapsed_s)
