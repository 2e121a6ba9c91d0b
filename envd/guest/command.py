"""What running a command in a guest yields, whichever way it went in. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command in the guest did."""

    exit_code: int
    """As a shell tells it: 128 plus the signal's number where a signal ended it."""
    stdout: bytes
    stderr: bytes
