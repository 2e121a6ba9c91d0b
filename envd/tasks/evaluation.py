"""What evaluating a task yields. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One checker's verdict, with its evidence."""

    name: str
    score: float
    """In [0, 1]."""
    evidence: str
    """What was found, in words; at most 2,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A task's score on the state that the guest is in."""

    score: float
    """In [0, 1]."""
    checks: tuple[CheckResult, ...]
