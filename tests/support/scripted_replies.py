"""A model with given replies, for the agent's loop."""

from collections.abc import Iterable, Sequence
from typing import Self

from cuaenv.actions import Action
from trainer.agent.grammars import grammar
from trainer.agent.types import Message, Reply


class ScriptedReplies:
    """Gives its replies in order and records its messages."""

    def __init__(self, replies: Iterable[str]) -> None:
        """Start without messages."""
        self._replies = iter(replies)
        self.rows: list[list[Message]] = []

    @classmethod
    def acting(cls, *turns: Sequence[Action]) -> Self:
        """Return a model that performs these actions, one sequence a reply."""
        return cls(grammar("qwen3-vl").render(turn) for turn in turns)

    async def begin(self, messages: Sequence[Message]) -> None:
        """Start a row."""
        self.rows.append(list(messages))

    async def append(self, message: Message) -> None:
        """Record a message."""
        self.rows[-1].append(message)

    async def generate(self) -> Reply:
        """Return the next reply."""
        text = next(self._replies)
        self.rows[-1].append(Message("assistant", (text,)))
        return Reply(text=text)
