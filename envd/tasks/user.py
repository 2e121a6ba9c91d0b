"""The user of a task, whom the agent may ask: what the user knows, and how the user answers. Pure."""

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from envd.tasks.fields import Model, Regex

Answer = Annotated[str, Field(min_length=1, max_length=8192)]


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
    """A user with a script."""

    facts: Annotated[tuple[Fact, ...], Field(min_length=1, max_length=50)]
    in_order: bool = False
    """Whether the user says a fact only after all facts before it."""
    not_yet: Answer = "Let us talk about something else first."
    """The answer to a question about a fact whose turn has not come."""
    unknown: Answer = "I do not know."
    """The answer to a question about none of the facts."""
    max_questions: Annotated[int, Field(ge=1, le=100)] = 10
    """Further questions are not answered."""

    def answer(self, question: str, asked: Sequence[Exchange]) -> str:
        """Return the answer to a question after earlier ones. Equal questions in equal order have equal answers."""
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
