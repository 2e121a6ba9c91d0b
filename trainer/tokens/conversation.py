"""A `Conversation` with any engine that takes and returns token ids. It sends sampled ids unchanged.

Every request has the complete row. If the engine counts the prompt's tokens, its count must equal ours. Otherwise it
read other tokens than those to be trained, for example because it re-tokenised text or resized an image: the sample is
void.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from trainer.agent.settings import TokenBudget
from trainer.agent.types import BudgetExhausted, GenerationAborted, Message, ModelFailed, PromptMismatch, Reply
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row, Segment

if TYPE_CHECKING:
    from PIL import Image


class Engine(Protocol):
    """Samples the replies of one conversation."""

    def encode(self, images: "Sequence[Image.Image]") -> None:
        """Prepare images that later requests will have. Runs in a thread. Raises: OSError."""

    async def sample(self, row: Row, *, limit: int) -> Reply:
        """Sample at most `limit` tokens after a row; their text is decoded. Raises: BudgetExhausted, ModelFailed."""


class TokenConversation:
    """The model's side of one episode. See `trainer.agent.types.Conversation`."""

    def __init__(
        self, chat: Chat, engine: Engine, *, budget: TokenBudget, is_aborted: Callable[[], bool] = lambda: False
    ) -> None:
        """Create a conversation without a row.

        Args:
            chat: The model's chat format.
            engine: Samples the replies.
            budget: Limits of each row.
            is_aborted: Whether the trainer needs no more samples.
        """
        self.rows: list[Row] = []
        """Rows in order; the last one is the current one."""
        self.replies: list[Reply] = []
        """All replies that it sampled, in order."""
        self._chat = chat
        self._engine = engine
        self._budget = budget
        self._is_aborted = is_aborted

    async def begin(self, messages: Sequence[Message]) -> None:
        """Start a new row. Raises: BudgetExhausted, ModelFailed."""
        segment = await self._encoded(lambda: self._chat.opening(messages))
        # A later row starts with all earlier messages, so only the limit of the complete row applies.
        limit = self._budget.total if self.rows else self._budget.prompt
        if len(segment.train_ids) > limit:
            raise BudgetExhausted(
                f"the prompt has {len(segment.train_ids)} tokens of {limit}", budget="total" if self.rows else "prompt"
            )
        self._check_images(len(segment.images))
        self.rows.append(Row(segment))

    async def resume(self, row: Row) -> None:
        """Continue a row of an earlier conversation of this episode, or the `prefix` of another one's."""
        await self._encoded(row.as_prompt)
        self.rows.append(row)

    def prefix(self) -> Row:
        """Return a row that starts with all that the model read and sampled in the current one before its latest reply.

        It is trained there, and not in the row of who continues.
        """
        return Row(self.rows[-1].as_prompt(without_last_reply=True))

    async def append(self, *messages: Message) -> None:
        """Add an observation to the row. Raises: BudgetExhausted, ModelFailed."""
        row = self.rows[-1]
        segment = await self._encoded(lambda: self._chat.following(*messages, last_id=row.last_id))
        # An observation that leaves no tokens for a reply is not added.
        if row.token_count + len(segment.train_ids) >= self._limit_of(row):
            raise BudgetExhausted(
                f"the row has {row.token_count} tokens, the observation {len(segment.train_ids)} more,"
                f" of {self._limit_of(row)}",
                budget="total",
            )
        self._check_images(len(row.images) + len(segment.images))
        row.observe(segment)

    async def generate(self) -> Reply:
        """Sample a reply and add it to the row. Raises: BudgetExhausted, GenerationAborted, ModelFailed."""
        self._check_abort()
        row = self.rows[-1]
        left = min(self._budget.reply, self._limit_of(row) - row.token_count)
        if left < 1:
            raise BudgetExhausted(f"the row has {row.token_count} tokens of {self._limit_of(row)}", budget="total")
        started_s = time.monotonic()
        sampled = await self._engine.sample(row, limit=left)
        elapsed_s = time.monotonic() - started_s
        self._check_abort()
        if sampled.finish == "abort":
            raise GenerationAborted("the engine aborted the request")
        if sampled.prompt_tokens not in (None, row.token_count):
            raise PromptMismatch(
                f"the engine read {sampled.prompt_tokens} prompt tokens instead of {row.token_count}: the sample"
                " would be trained on other tokens than it was sampled with"
            )
        if not sampled.token_ids:
            raise ModelFailed("the engine's response has no token ids; it must return log-probabilities")
        if placeholder := self._chat.placeholder_in(sampled.token_ids):
            # Void would be the policy's choice. The reply is not trained, and the state before it is scored.
            raise BudgetExhausted(
                f"the model sampled {placeholder}, which stands for a picture in all later prompts",
                budget="placeholder",
            )
        row.reply(sampled.token_ids, sampled.log_probs, text=sampled.text, extra=sampled.extra or {})
        text = self._chat.reply_text(sampled.text, sampled.token_ids)
        reply = replace(sampled, text=text, elapsed_s=elapsed_s, extra=None)
        self.replies.append(reply)
        return reply

    async def _encoded(self, make: Callable[[], Segment]) -> Segment:
        """Make a segment and encode its images, in a thread."""

        def run() -> Segment:
            segment = make()
            self._engine.encode(segment.images)
            return segment

        return await asyncio.to_thread(run)

    def _limit_of(self, row: Row) -> int:
        budget = self._budget
        return budget.total if budget.response is None else min(budget.total, len(row.prompt_ids) + budget.response)

    def _check_abort(self) -> None:
        if self._is_aborted():
            raise GenerationAborted("the trainer needs no more samples")

    def _check_images(self, count: int) -> None:
        if count > self._budget.images:
            raise BudgetExhausted(f"the row would have {count} images of {self._budget.images}", budget="images")
