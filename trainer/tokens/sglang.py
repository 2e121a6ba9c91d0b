"""A `Conversation` with slime's SGLang engine, which sends sampled ids unchanged and checks the engine's token count.

Every request has the complete row, and the engine's count of prompt tokens must equal ours. Otherwise the engine read
other tokens than those to be trained, for example because it re-tokenised text or resized an image: the sample is void.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer.agent.types import (
    BudgetExhausted,
    GenerationAborted,
    Message,
    ModelFailed,
    PromptMismatch,
    Reply,
    data_uri,
)
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row, Segment

if TYPE_CHECKING:
    from PIL import Image


class Engine(Protocol):
    """One call of SGLang's `/generate`. Raises: ModelFailed."""

    async def __call__(self, payload: Mapping[str, Any]) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Limits of a row, in tokens of the trainer's stream."""

    prompt: int
    """Tokens of the prompt, the first screenshot included."""
    reply: int
    """Tokens of one reply."""
    total: int
    """Tokens of the complete row."""
    images: int
    """Number of images."""


class SglangConversation:
    """The model's side of one episode. See `trainer.agent.types.Conversation`."""

    def __init__(
        self,
        chat: Chat,
        engine: Engine,
        *,
        budget: TokenBudget,
        sampling_params: Mapping[str, Any],
        is_aborted: Callable[[], bool],
        extras: Mapping[str, Any] | None = None,
        encode_image: "Callable[[Image.Image], Any] | None" = None,
    ) -> None:
        """Create a conversation without a row.

        Args:
            chat: The model's chat format.
            engine: Samples the replies.
            budget: Limits of each row.
            sampling_params: SGLang's parameters; `max_new_tokens` is set for each reply.
            is_aborted: Whether the trainer needs no more samples.
            extras: Additional fields of each request, such as `return_routed_experts`.
            encode_image: Converts an image for the engine; by default to a data URI.
        """
        self.rows: list[Row] = []
        """Rows in order; the last one is the current one."""
        self._chat = chat
        self._engine = engine
        self._budget = budget
        self._sampling_params = dict(sampling_params)
        self._is_aborted = is_aborted
        self._extras = dict(extras or {})
        # Each request sends all images of the row; each is encoded once. Keyed by id(), so it keeps them alive.
        self._encoded: dict[int, tuple[Image.Image, Any]] = {}
        self._encode_image = encode_image or data_uri

    async def begin(self, messages: Sequence[Message]) -> None:
        """Start a new row. Raises: BudgetExhausted, ModelFailed."""
        segment = await asyncio.to_thread(self._with_images, lambda: self._chat.opening(messages))
        # A later row starts with all earlier messages, so only the limit of the complete row applies.
        limit = self._budget.total if self.rows else self._budget.prompt
        if len(segment.train_ids) > limit:
            raise BudgetExhausted(
                f"the prompt has {len(segment.train_ids)} tokens of {limit}", budget="total" if self.rows else "prompt"
            )
        self._check_images(len(segment.images))
        self.rows.append(Row(segment))

    async def continue_from(self, prefix: Segment) -> None:
        """Start with the row of another conversation, see `Row.as_prompt`; it is trained there and not here."""
        self.rows.append(Row(await asyncio.to_thread(self._with_images, lambda: prefix)))

    async def resume(self, row: Row) -> None:
        """Continue a row of an earlier conversation of this episode."""
        await asyncio.to_thread(self._with_images, row.as_prompt)
        self.rows.append(row)

    async def append(self, message: Message) -> None:
        """Add an observation to the row. Raises: BudgetExhausted, ModelFailed."""
        row = self.rows[-1]
        segment = await asyncio.to_thread(self._with_images, lambda: self._chat.following(message, last_id=row.last_id))
        # An observation that leaves no tokens for a reply is not added.
        if row.token_count + len(segment.train_ids) >= self._budget.total:
            raise BudgetExhausted(
                f"the row has {row.token_count} tokens, the observation {len(segment.train_ids)} more,"
                f" of {self._budget.total}",
                budget="total",
            )
        self._check_images(len(row.images) + len(segment.images))
        row.observe(segment)

    async def generate(self) -> Reply:
        """Sample a reply and add it to the row. Raises: BudgetExhausted, GenerationAborted, ModelFailed."""
        self._check_abort()
        row = self.rows[-1]
        left = min(self._budget.reply, self._budget.total - row.token_count)
        if left < 1:
            raise BudgetExhausted(f"the row has {row.token_count} tokens of {self._budget.total}", budget="total")
        started_s = time.monotonic()
        answer = await self._engine(self._request(row, left))
        elapsed_s = time.monotonic() - started_s
        self._check_abort()
        meta_info = answer["meta_info"]
        finish = meta_info["finish_reason"]["type"]
        if finish == "abort":
            raise GenerationAborted("the engine aborted the request")
        if meta_info["prompt_tokens"] != row.token_count:
            raise PromptMismatch(
                f"the engine read {meta_info['prompt_tokens']} prompt tokens instead of {row.token_count}: the sample"
                " would be trained on other tokens than it was sampled with"
            )
        sampled = meta_info.get("output_token_logprobs") or ()
        token_ids = tuple(int(entry[1]) for entry in sampled)
        log_probs = tuple(float(entry[0]) for entry in sampled)
        if not token_ids:
            raise ModelFailed("the engine's response has no token ids; it must return log-probabilities")
        if placeholder := self._chat.placeholder_in(token_ids):
            # Void would be the policy's choice. The reply is not trained, and the state before it is scored.
            raise BudgetExhausted(
                f"the model sampled {placeholder}, which stands for a picture in all later prompts",
                budget="placeholder",
            )
        row.reply(token_ids, log_probs, text=answer["text"], meta_info=meta_info)
        return Reply(
            text=self._chat.reply_text(answer["text"], token_ids),
            token_ids=token_ids,
            log_probs=log_probs,
            finish="length" if finish == "length" else "stop",
            elapsed_s=elapsed_s,
        )

    def _request(self, row: Row, reply_limit: int) -> dict[str, Any]:
        request = {
            **self._extras,
            "input_ids": list(row.engine_ids),
            "sampling_params": {**self._sampling_params, "max_new_tokens": reply_limit},
            "return_logprob": True,
        }
        if row.images:
            request["image_data"] = [self._encoded[id(image)][1] for image in row.images]
        return request

    def _with_images(self, make: Callable[[], Segment]) -> Segment:
        """Return a segment, and encode its images."""
        segment = make()
        for image in segment.images:
            if id(image) not in self._encoded:
                self._encoded[id(image)] = image, self._encode_image(image)
        return segment

    def _check_abort(self) -> None:
        if self._is_aborted():
            raise GenerationAborted("the trainer needs no more samples")

    def _check_images(self, count: int) -> None:
        if count > self._budget.images:
            raise BudgetExhausted(f"the row would have {count} images of {self._budget.images}", budget="images")


_CONTEXT_FULL = (
    "context_length_exceeded",
    "maximum context length",
    "longer than the model's context length",
    "exceeds the maximum allowed length",
)


def is_context_full(status: int, text: str) -> bool:
    """Return whether a refusal means that the prompt does not fit into the model's context."""
    return status in {400, 413, 422} and any(sign in text for sign in _CONTEXT_FULL)
