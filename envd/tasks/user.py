"""The user of a task, whom the agent may ask: what the user knows, and how the user answers.

A user has a script, or a persona that a model plays (`envd.tasks.user_model`).
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from envd.tasks.fields import Model, Regex
from envd.tasks.text import CheckOutcome, CheckPart

if TYPE_CHECKING:
    from envd.tasks.checkers.base import Judge

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

    async def answer(self, question: str, asked: Sequence[Exchange], *, judge: "Judge") -> str:
        """Return the scripted answer to a question after earlier ones, the same for equal questions in equal order.

        Raises:
            EvaluatorFailed: See `Judge`.
        """
        found = await judge(judge_question, self, question, tuple(asked))
        if found.parts:
            return " ".join(self.facts[int(part.name)].answer for part in found.parts)
        return self.not_yet if found.score else self.unknown


def judge_question(user: TaskUser, question: str, asked: Sequence[Exchange]) -> CheckOutcome:
    """Return which facts a user says, by their indexes as parts; the score is 1 if the question is about any fact.

    Run by a judge: an agent writes the question, and three words between wildcards take seconds for 4 KiB.
    """

    def about(text: str) -> list[int]:
        return [index for index, fact in enumerate(user.facts) if re.search(fact.about, text, re.IGNORECASE)]

    known: set[int] = set()
    said: list[int] = []
    for each in (*(exchange.question for exchange in asked if user.in_order), question):
        matching, said = about(each), []
        for index in matching:
            if not user.in_order or known.issuperset(range(index)):
                said.append(index)
                known.add(index)
    return CheckOutcome(float(bool(matching)), "", tuple(CheckPart(str(index), 1.0, "") for index in said))
