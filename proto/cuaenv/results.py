"""Results that are the same for the service and its clients."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """State of an episode."""

    #: Accepts steps.
    ACTIVE = "active"
    #: The agent ended it with done or fail, the guest ended itself, or the task reached a terminal state.
    TERMINATED = "terminated"
    #: Ended by a limit or an evaluation; not terminal in the task.
    TRUNCATED = "truncated"
    #: Lost to a fault of the service; void for training.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command in a guest."""

    exit_code: int
    """Exit status as in a shell: 128 plus the signal number if a signal ended it. At most 32 bits, as on the wire."""
    stdout: bytes
    stderr: bytes

    def __post_init__(self) -> None:
        """Clamp the exit code: it is a guest's, which may send any integer."""
        object.__setattr__(self, "exit_code", max(-(1 << 31), min(self.exit_code, (1 << 31) - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedRequest:
    """A request of a guest's program that the pool's web recording does not have."""

    kind: str
    """`not_recorded`; or `websocket`, which no recording has."""
    method: str
    url: str

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')}: {self.method} {self.url}"
