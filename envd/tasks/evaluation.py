"""The result of evaluating a task. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one checker."""

    name: str
    score: float
    """A value in [0, 1]."""
    evidence: str
    """What was found; at most 2,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A task's score, with the results of its checkers."""

    score: float
    """A value in [0, 1]."""
    checks: tuple[CheckResult, ...]
