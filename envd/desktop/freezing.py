"""Take a Linux guest away from its agent: freeze the processes of its session, and run commands apart from it.

Root's agent runs the scripts of `shell/`. They use programs of the system only, and need neither the session nor
guestd.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from envd.base.errors import GuestError
from envd.desktop.agent import GuestAgent

#: A fork bomb on a slow host: the kernel stops each process by itself.
_TIMEOUT_S = 60.0
#: Shorter: after a failed freeze, the evaluation must end by that failure and not by its own limit.
_THAW_TIMEOUT_S = 30.0
_MESSAGE_BYTES = 500


@cache
def _script(name: str) -> str:
    return (files("envd.guests") / "shell" / f"{name}.sh").read_text(encoding="ascii")


async def freeze(agent: GuestAgent) -> None:
    """Stop all processes of the session until `thaw`. Has no effect in Windows itself, which has no such means.

    Raises:
        GuestError, GuestUnresponsive: They still run, or may.
    """
    await _run(agent, "freeze-session", timeout_s=_TIMEOUT_S)


async def thaw(agent: GuestAgent) -> None:
    """Let the session continue. Raises: GuestError, GuestUnresponsive."""
    await _run(agent, "thaw-session", timeout_s=_THAW_TIMEOUT_S)


def as_user(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command for root's agent that runs a command with the rights of the session's user, outside of it."""
    return ("sh", "-c", _script("run-as-user"), "run-as-user", *argv)


async def _run(agent: GuestAgent, name: str, *, timeout_s: float) -> None:
    script = _script("groups") + _script(name)
    result = await agent.run(["/bin/sh", "-c", script, name], timeout_s=timeout_s)
    if result.exit_code:
        message = result.stderr[:_MESSAGE_BYTES].decode("utf-8", "replace").strip()
        raise GuestError(f"{name}: exit code {result.exit_code}: {message or 'no message'}")
