"""A conversation with AReaL's engine: records the prompt, reply and log-probabilities of each turn.

AReaL's engine takes a row with one placeholder per image token and reports the ids that it read. If they differ from
the ids sent, the training data would not be what the model saw, and the episode is void.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.agent.settings import AgentSettings
from trainer.agent.types import ModelFailed, Reply
from trainer.tokens.chat import Chat
from trainer.tokens.sglang import SglangConversation, TokenBudget

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request."""

    input_ids: list[int]
    images: list[str]
    """PNGs in base64, in order of appearance."""
    max_new_tokens: int
    max_tokens: int
    """Limit of the row, including this reply."""


Engine = Callable[[Request], Awaitable[Any]]
"""Calls AReaL's engine; returns an `areal.api.ModelResponse`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """The prompt and the reply of one turn."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """Version of the weights that sampled each output id."""
    images: "tuple[Image.Image, ...]"
    """Images in order of appearance."""


class ArealConversation(SglangConversation):
    """A conversation with AReaL's engine that records each turn with its complete prompt."""

    def __init__(self, chat: Chat, engine: Engine, *, settings: AgentSettings, engine_timeout_s: float) -> None:
        """Create a conversation without a row."""
        cost = settings.row_cost
        budget = TokenBudget(
            prompt=cost.prompt + cost.image + cost.tree,
            reply=settings.reply_tokens,
            total=settings.context_tokens,
            images=cost.images,
        )
        super().__init__(chat, self._call, budget=budget, sampling_params={}, is_aborted=lambda: False)
        self._areal_engine = engine
        self._timeout_s = engine_timeout_s
        self._turn_rows: list[TurnRow] = []
        self.turns: list[tuple[Reply, TurnRow]] = []
        """Each reply with its row, in order."""

    async def generate(self) -> Reply:
        """Sample a reply and add it to the row. Raises: BudgetExhausted, ModelFailed."""
        reply = await super().generate()
        self.turns.append((reply, self._turn_rows[-1]))
        return reply

    async def _call(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call AReaL's engine for a request to SGLang's `/generate`; return an equivalent response."""
        prompt = self.rows[-1].as_prompt()
        request = Request(
            input_ids=list(prompt.train_ids),
            # Without the prefix of a data URI.
            images=[uri.partition(",")[2] for uri in payload.get("image_data", ())],
            max_new_tokens=payload["sampling_params"]["max_new_tokens"],
            max_tokens=self._budget.total,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._areal_engine(request)
        except Exception as error:
            raise ModelFailed(f"AReaL's engine: no response: {type(error).__name__}: {error}") from error
        if tuple(response.input_tokens) != prompt.train_ids:
            raise ModelFailed(
                f"AReaL's engine read {len(response.input_tokens)} ids, which differ from the"
                f" {len(prompt.train_ids)} ids sent"
            )
        turn = TurnRow(
            input_ids=prompt.train_ids,
            output_ids=tuple(response.output_tokens),
            log_probs=tuple(response.output_logprobs),
            versions=tuple(response.output_versions),
            images=prompt.images,
        )
        if not len(turn.output_ids) == len(turn.log_probs) == len(turn.versions):
            raise ModelFailed(
                f"AReaL's engine returned {len(turn.output_ids)} ids with {len(turn.log_probs)} log-probabilities"
                f" and {len(turn.versions)} versions"
            )
        self._turn_rows.append(turn)
        return {
            "text": self._chat.decode(turn.output_ids),
            "meta_info": {
                "finish_reason": {"type": "length" if response.stop_reason == "length" else "stop"},
                "prompt_tokens": len(turn.input_ids),
                "output_token_logprobs": list(zip(turn.log_probs, turn.output_ids, strict=True)),
            },
        }
