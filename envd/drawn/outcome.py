"""Result of a program of a fake guest."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What a program printed, how it ended, and the time that the real one would take."""

    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    duration_s: float = 0.0
    ends_shell: bool = False
    """Whether it was `exit`."""
