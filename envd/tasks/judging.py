"""How the pure part of a checker is run on what a guest made.

A daemon passes `envd.daemon.judging.workers.JudgeWorkers`: a file or a picture of a guest can keep a decoder busy for
hours, fill the memory, or hold the interpreter lock.
"""

from collections.abc import Callable
from typing import Protocol

from envd.tasks.text import CheckOutcome


class Judge(Protocol):
    """Runs a pure judge function on what a guest made."""

    async def __call__(self, function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
        """Return the function's outcome. Raises: GuestError: It has none, or not within its limits."""


async def judge_directly(function: Callable[..., CheckOutcome], /, *arguments: object) -> CheckOutcome:
    """Run a judge function in this process: for tests of checkers."""
    return function(*arguments)
