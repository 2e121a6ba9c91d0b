"""The user of a task, whom the agent may ask: what the user knows, and how the user answers.

A user has a script, or a persona that a model plays (`envd.tasks.user_model`).
"""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from envd.base.errors import UserUnavailable
from envd.tasks.fields import Model, Regex
from envd.tasks.text import CheckOutcome, CheckResult

if TYPE_CHECKING:
    from envd.tasks.checkers.base import Judge

logger = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 8192
_CONTROL_QUESTION = "Hello, are you there?"
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


async def answer_or_nothing(
    ask: Callable[[str, Sequence["Exchange"]], Awaitable[str]], question: str, asked: Sequence["Exchange"]
) -> str:
    """Return the answer to a question after earlier ones; empty if they are why there is none.

    An agent can ask what fills a model's context, what an endpoint refuses, or what takes too long. If that made its
    episode void, it could remove a failing one. So the failure is ours only if a question of ours, alone, fails too.

    Raises:
        UserUnavailable: Our own question gets no answer either.
    """
    try:
        return await ask(question, asked)
    except UserUnavailable as error:
        failure = error
    await ask(_CONTROL_QUESTION, ())
    logger.warning("%s, but another question is answered: the agent's own gets no answer", failure)
    if isinstance(failure.__cause__, TimeoutError):
        return ""  # a second attempt would outlast the step
    try:
        return await ask(question, asked)
    except UserUnavailable:
        return ""


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
    return CheckOutcome(
        float(bool(matching)), "", tuple(CheckResult(name=str(index), score=1.0, evidence="") for index in said)
    )
