"""The user's session in one guest: its HTTP service, home directory and files; and when it is ready after the boot.

Agent, session, screen and processors become ready in that order.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from envd.base.channels import GuestChannels
from envd.base.clock import running_timeout
from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, GuestUnresponsive
from envd.desktop.agent import GuestAgent
from envd.desktop.display_connection import DesktopView
from envd.desktop.guestd import GuestdClient
from envd.desktop.input.plan import KEY_PAUSE_S
from envd.desktop.settler import Settler
from envd.guests.powershell import Script, powershell

_CALL_TIMEOUT_S = 5.0
#: For a session to show that it lives, on a slow guest of a busy host too.
_ALIVE_TIMEOUT_S = 20.0
_MESSAGE_BYTES = 500
#: A script starts PowerShell twice and compiles code, which takes seconds. `in-session.ps1` waits 20 s for its start.
_SCRIPT_TIMEOUT_S, _START_TIMEOUT_S = 60.0, 30.0
#: A command has at most 32,767 characters, in which a text occurs twice with its quotes doubled.
_TYPED_AT_ONCE_CHARS = 1000
#: Limits of an accessibility tree, in elements and seconds.
_TREE_LIMIT = 5000
_TREE_SECONDS = 30
_LAST_POLL_S = 1.0
_PROBE_TIMEOUT_S = 5.0
# An idle desktop uses a few hundredths of a core, one that still starts services uses all of one; some are never idle.
_IDLE_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPauses:
    """Pauses between the readings and events of one guest. Tests with drawn guests shorten them."""

    first_poll_s: float = 0.1
    """Pause after the first reading of a guest that is not ready; each later one is longer."""
    boot_quiet_ms: int = 500
    """A booted guest's screen must not have changed for this long."""
    boot_reading_s: float = 2.0
    """Period over which a booted guest's CPU time is measured."""
    max_idle_wait_s: float = 60.0
    """Longest wait for a booted guest to be idle."""
    idle_reading_s: float = 0.5
    """Period over which a running guest's CPU time is measured."""
    key_pause_s: float = KEY_PAUSE_S
    """Pause after each key event."""
    pointer_poll_s: float = 0.1
    """Pause between readings of the pointer's position."""
    input_settle: SettlePolicy = field(default_factory=lambda: SettlePolicy(quiet_ms=100, idle_ms=0, max_ms=1500))
    """How long input may take to have its effect before later input that depends on it, bounded.

    Two cases: a click focuses a window only after the window manager has handled it, and keys sent at once would go to
    the old one; and guestd's connection to the X server is not the keyboard's, so text could overtake keys.
    """


class GuestSession:
    """The session of one guest, reached through guestd and the guest agent. Every method may raise `MachineLost`."""

    def __init__(
        self, channels: GuestChannels, agent: GuestAgent, *, view: DesktopView | None, has_powershell: bool = False
    ) -> None:
        """Reach the session of a machine; `view` is that of its parent, if it was forked."""
        self._machine_id = channels.machine_id
        self._agent = agent
        self._guestd: GuestdClient | None = None
        if channels.guestd_url:
            self._guestd = GuestdClient(channels.guestd_url, lost=channels.lost)
        self.has_powershell = has_powershell
        """Whether its agent runs the scripts of `envd.guests.powershell`."""
        self.guestd_types = view.guestd_types if view else self._guestd is not None
        """Whether the service can type. OSWorld's cannot; which service it is, is known after the first answer."""
        self.home = view.home if view else None
        """The user's home directory; None until it is needed."""

    @property
    def has_guestd(self) -> bool:
        """Whether the image has an HTTP service."""
        return self._guestd is not None

    def guestd(self, purpose: str) -> GuestdClient:
        """Return the client of the HTTP service. Raises: GuestError: the image has none; names `purpose`."""
        if self._guestd is None:
            raise GuestError(f"cannot {purpose}: machine {self._machine_id} has no guestd")
        return self._guestd

    async def is_alive(self) -> bool:
        """Return whether the desktop is ready, after a request that did not end in time; False without a service."""
        try:
            return self._guestd is not None and (await self._guestd.session(timeout_s=_ALIVE_TIMEOUT_S)).ready
        except (GuestError, GuestUnresponsive):
            return False

    async def type_by_script(self, text: str) -> None:
        """Type a text into the focused window of a Windows guest. On failure part of it may have been typed.

        Raises:
            GuestError: No user is logged in, or the text cannot be typed.
        """
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        for start in range(0, len(text), _TYPED_AT_ONCE_CHARS):
            await self._run_script(Script.TYPE_TEXT, "type text", text=text[start : start + _TYPED_AT_ONCE_CHARS])

    async def accessibility(self, *, showing: bool) -> str:
        """Return the accessibility tree as XML, from the HTTP service or by a script; see `GuestdClient.accessibility`.

        Raises:
            GuestError: The guest has neither, or its tree cannot be read.
        """
        purpose = "read the accessibility tree"
        if self._guestd is None and self.has_powershell:
            tree = await self._run_script(
                Script.ACCESSIBILITY_TREE, purpose, limit=str(_TREE_LIMIT), seconds=str(_TREE_SECONDS)
            )
            return tree.decode("utf-8", "replace")
        return await self.guestd(purpose).accessibility(showing=showing)

    async def use_tool(self, request: bytes, timeout_s: float) -> bytes:
        """Return the response of a Windows guest's script `use-tool` to a request, which is one line.

        Raises:
            GuestError: No user is logged in, or the script failed.
            GuestUnresponsive: Not done within `timeout_s` and the time that the script takes to start.
        """
        return await self._run_script(Script.USE_TOOL, "use tools", request, timeout_s)

    async def _run_script(
        self, script: Script, purpose: str, stdin: bytes = b"", wait_s: float = _SCRIPT_TIMEOUT_S, **values: str
    ) -> bytes:
        """Run a script and return its output. Raises: GuestError, GuestUnresponsive."""
        command = powershell(script, wait_s=f"{wait_s:g}", **values)
        result = await self._agent.run(command, timeout_s=wait_s + _START_TIMEOUT_S, stdin=stdin)
        if result.exit_code:
            message = result.stderr[:_MESSAGE_BYTES].decode("utf-8", "replace").strip()
            raise GuestError(f"cannot {purpose}: machine {self._machine_id}: {message or 'the script failed'}")
        return result.stdout

    async def read_file(self, path: str, *, max_bytes: int) -> bytes | None:
        """Return a file's bytes, read by root; None if it does not exist. See `Desktop.read_file`."""
        return await self._agent.read_file(await self._expand(path), max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file as the user, or as root without guestd. See `Desktop.write_file`."""
        if self._guestd is not None:
            await self._guestd.write_file(path, data)
            return
        path = await self._expand(path)
        with suppress(GuestError):  # only Linux guests have mkdir
            await self._agent.run(["mkdir", "-p", str(PurePosixPath(path).parent)], timeout_s=_CALL_TIMEOUT_S)
        await self._agent.write_file(path, data)

    async def close(self) -> None:
        if self._guestd is not None:
            await self._guestd.close()

    async def _expand(self, path: str) -> str:
        if path != "~" and not path.startswith("~/"):
            return path
        if self.home is None:
            result = await self.guestd(f"expand {path}").execute(["printenv", "HOME"], timeout_s=_CALL_TIMEOUT_S)
            home = result.stdout.decode("utf-8", "replace").strip()
            if result.exit_code or not home.startswith("/"):
                raise GuestError(f"cannot expand {path}: the session on {self._machine_id} has no HOME")
            self.home = home.rstrip("/")
        return self.home + path[1:]


async def wait_ready(
    channels: GuestChannels,
    *,
    agent: GuestAgent,
    session: GuestSession,
    settler: Settler,
    pauses: GuestPauses,
    timeout_s: float,
) -> None:
    """Return once the agent answers, the session is up, the screen has settled and the guest is idle.

    An idle guest is waited for at most 60 s: some guests never are. Raises: GuestUnresponsive: Not in time.
    """
    problem = ""

    async def poll(find_problem: Callable[[], Awaitable[str]]) -> None:
        """Wait until there is no problem, polling less and less often."""
        nonlocal problem
        poll_s = pauses.first_poll_s
        while problem := await find_problem():
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 1.5, _LAST_POLL_S)

    async def screen_problem() -> str:
        result = await settler.settle(SettlePolicy(quiet_ms=pauses.boot_quiet_ms, idle_ms=0))
        return "" if result.settled else f"{result.change_count} changes in {result.settle_ms:.0f} ms"

    missing = "the guest agent did not answer"
    try:
        async with running_timeout(timeout_s):
            await poll(lambda: _agent_problem(agent))
            if session.has_guestd:
                missing = "the session did not come up"
                await poll(lambda: _session_problem(session))
            missing = "the screen did not settle"
            await poll(screen_problem)
            await wait_idle(channels, reading_s=pauses.boot_reading_s, max_wait_s=pauses.max_idle_wait_s)
    except TimeoutError as error:
        detail = f" ({problem})" if problem else ""
        raise GuestUnresponsive(
            f"machine {channels.machine_id} is not ready after {timeout_s:g} s: {missing}{detail}"
        ) from error


async def _agent_problem(agent: GuestAgent) -> str:
    try:
        await agent.ping(timeout_s=_PROBE_TIMEOUT_S)
    except (GuestUnresponsive, GuestError) as error:
        return str(error)
    return ""


async def _session_problem(session: GuestSession) -> str:
    try:
        state = await session.guestd("query the session").session(timeout_s=_PROBE_TIMEOUT_S)
    except (GuestUnresponsive, GuestError) as error:
        return str(error)
    session.guestd_types = bool(state.version)
    return "" if state.ready else state.problem or "guestd reports that it is not ready"


async def wait_idle(channels: GuestChannels, *, reading_s: float, max_wait_s: float) -> None:
    """Return once the guest used next to no CPU time for `reading_s`, after at most about `max_wait_s`."""
    deadline_s = time.monotonic() + max_wait_s
    used_s = channels.processor_s()
    while used_s is not None and time.monotonic() < deadline_s:
        await asyncio.sleep(reading_s)
        before_s, used_s = used_s, channels.processor_s()
        if used_s is None or used_s - before_s < _IDLE_SHARE * reading_s:
            return
