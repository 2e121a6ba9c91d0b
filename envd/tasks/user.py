"""The user of a task, whom the agent may ask: what the user knows, and how the user answers. Pure.

A user has a script, or a persona that a model plays (`envd.tasks.user_model`).
"""

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from envd.tasks.fields import Model, Regex

MAX_ANSWER_CHARS = 8192
Answer = Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARS)]


class Exchange(NamedTuple):
    """A question of the agent, and the user's answer."""

    question: str
    answer: str


class Fact(Model):
    """Something that the user knows."""

    about: Regex
    """The user says it if the question matches this anywhere, whatever the letters' case."""
    answer: Answer


class TaskUser(Model):
    """A user with either facts or a persona."""

    facts: Annotated[tuple[Fact, ...], Field(max_length=50)] = ()
    persona: Annotated[str, Field(max_length=MAX_ANSWER_CHARS)] = ""
    """What the user is like, knows and wants, for the model that answers."""
    in_order: bool = False
    """Whether the user says a fact only after all facts before it."""
    not_yet: Answer = "Let us talk about something else first."
    """The answer to a question about a fact whose turn has not come."""
    unknown: Answer = "I do not know."
    """The answer to a question about none of the facts."""
    max_questions: Annotated[int, Field(ge=1, le=100)] = 10
    """Further questions are not answered."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.facts) == bool(self.persona):
            raise ValueError("give either facts or a persona")
        return self

    def answer(self, question: str, asked: Sequence[Exchange]) -> str:
        """Return the scripted answer to a question after earlier ones, the same for equal questions in equal order."""
        known: set[int] = set()
        for earlier in asked:
            known.update(self._said(earlier.question, known))
        said = self._said(question, known)
        if said:
            return " ".join(self.facts[index].answer for index in said)
        return self.not_yet if self._matching(question) else self.unknown

    def _said(self, question: str, known: set[int]) -> list[int]:
        said: list[int] = []
        for index in self._matching(question):
            if not self.in_order or known.union(said).issuperset(range(index)):
                said.append(index)
        return said

    def _matching(self, question: str) -> list[int]:
        return [index for index, fact in enumerate(self.facts) if re.search(fact.about, question, re.IGNORECASE)]
