"""The union of all checkers, discriminated by `kind`, and their combinations: all, any, weighted."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from envd.tasks.checkers.base import CheckBase, LeafChecker
from envd.tasks.checkers.data import CsvCell, IniEntry, JsonValueAt, Registry, XmlNode
from envd.tasks.checkers.files import Directory, FileAbsent, FileBytes, FileText
from envd.tasks.checkers.graded_text import GradedText
from envd.tasks.checkers.images import ImageLike
from envd.tasks.checkers.programs import Command, PoweredOff, ProcessRunning, WindowPresent
from envd.tasks.checkers.session import AgentAnswer, Clipboard, OnScreen
from envd.tasks.checkers.unchanged import Unchanged
from envd.tasks.fields import Model
from envd.tasks.systems import task_systems


class AllOf(CheckBase):
    """The minimum of its parts."""

    kind: Literal["all"]
    checks: Annotated[tuple["Checker", ...], Field(min_length=1)]


class AnyOf(CheckBase):
    """The maximum of its parts."""

    kind: Literal["any"]
    checks: Annotated[tuple["Checker", ...], Field(min_length=1)]


class WeightedPart(Model):
    """A part of `Weighted`."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    check: "Checker"


class Weighted(CheckBase):
    """The weighted mean of its parts: partial credit."""

    kind: Literal["weighted"]
    checks: Annotated[tuple[WeightedPart, ...], Field(min_length=1)]


_OwnLeafChecker = (
    FileText
    | FileBytes
    | FileAbsent
    | Directory
    | Unchanged
    | JsonValueAt
    | CsvCell
    | IniEntry
    | XmlNode
    | ImageLike
    | Command
    | PoweredOff
    | ProcessRunning
    | WindowPresent
    | Clipboard
    | OnScreen
    | Registry
    | AgentAnswer
    | GradedText
)
if TYPE_CHECKING:
    AnyLeafChecker = LeafChecker
else:
    AnyLeafChecker = Union[_OwnLeafChecker, *(system.checker for system in task_systems())]
AnyChecker = AnyLeafChecker | AllOf | AnyOf | Weighted
Checker = Annotated[AnyChecker, Field(discriminator="kind")]


def parts_of(checker: AllOf | AnyOf | Weighted) -> tuple[AnyChecker, ...]:
    return tuple(part.check if isinstance(part, WeightedPart) else part for part in checker.checks)


def combine(checker: AllOf | AnyOf | Weighted, scores: Sequence[float]) -> float:
    match checker:
        case AllOf():
            return min(scores)
        case AnyOf():
            return max(scores)
        case Weighted():
            weights = [part.weight for part in checker.checks]
            # Divides last, so that the result is exactly 1.0 if all scores are.
            return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)


def leaves(checker: AnyChecker) -> Iterator[AnyLeafChecker]:
    """Yield the leaf checkers, in declared order."""
    if isinstance(checker, AllOf | AnyOf | Weighted):
        for part in parts_of(checker):
            yield from leaves(part)
    else:
        yield checker
