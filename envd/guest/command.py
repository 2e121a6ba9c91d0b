"""The result of a command in a guest. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command in a guest."""

    exit_code: int
    """Exit status as in a shell: 128 plus the signal number if a signal ended it. At most 32 bits, as on the wire."""
    stdout: bytes
    stderr: bytes

    def __post_init__(self) -> None:
        """Clamp the exit code: it is a guest's, which may send any integer."""
        object.__setattr__(self, "exit_code", max(-(1 << 31), min(self.exit_code, (1 << 31) - 1)))
