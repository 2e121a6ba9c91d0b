"""Wait until a booted guest is ready: agent, session, screen and processors, in that order."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from envd.base.channels import GuestChannels
from envd.base.clock import running_timeout
from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, GuestUnresponsive
from envd.desktop.agent import GuestAgent
from envd.desktop.input.plan import KEY_PAUSE_S
from envd.desktop.session import GuestSession
from envd.desktop.settling import Settler

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


@dataclass(slots=True, kw_only=True)
class ReadinessProbe:
    """Checks the parts of one guest until each is ready."""

    channels: GuestChannels
    agent: GuestAgent
    session: GuestSession
    settler: Settler
    pauses: GuestPauses
    _problem: str = field(default="", init=False)

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once the agent answers, the session is up, the screen has settled and the guest is idle.

        An idle guest is waited for at most 60 s: some guests never are.
        """
        missing = "the guest agent did not answer"
        try:
            async with running_timeout(timeout_s):
                await self._poll(self._agent_problem)
                if self.session.has_guestd:
                    missing = "the session did not come up"
                    await self._poll(self._session_problem)
                missing = "the screen did not settle"
                await self._poll(self._screen_problem)
                pauses = self.pauses
                await wait_idle(self.channels, reading_s=pauses.boot_reading_s, max_wait_s=pauses.max_idle_wait_s)
        except TimeoutError as error:
            detail = f" ({self._problem})" if self._problem else ""
            raise GuestUnresponsive(
                f"machine {self.channels.machine_id} is not ready after {timeout_s:g} s: {missing}{detail}"
            ) from error

    async def _poll(self, problem: Callable[[], Awaitable[str]]) -> None:
        """Wait until `problem` returns an empty string, polling less and less often."""
        self._problem = ""
        poll_s = self.pauses.first_poll_s
        while current := await problem():
            self._problem = current
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 1.5, _LAST_POLL_S)

    async def _agent_problem(self) -> str:
        try:
            await self.agent.ping(timeout_s=_PROBE_TIMEOUT_S)
        except (GuestUnresponsive, GuestError) as error:
            return str(error)
        return ""

    async def _session_problem(self) -> str:
        try:
            state = await self.session.guestd("query the session").session(timeout_s=_PROBE_TIMEOUT_S)
        except (GuestUnresponsive, GuestError) as error:
            return str(error)
        self.session.guestd_types = bool(state.version)
        return "" if state.ready else state.problem or "guestd reports that it is not ready"

    async def _screen_problem(self) -> str:
        result = await self.settler.settle(SettlePolicy(quiet_ms=self.pauses.boot_quiet_ms, idle_ms=0))
        return "" if result.settled else f"{result.change_count} changes in {result.settle_ms:.0f} ms"


async def wait_idle(channels: GuestChannels, *, reading_s: float, max_wait_s: float) -> None:
    """Return once the guest used next to no CPU time for `reading_s`, after at most about `max_wait_s`."""
    deadline_s = time.monotonic() + max_wait_s
    used_s = channels.processor_s()
    while used_s is not None and time.monotonic() < deadline_s:
        await asyncio.sleep(reading_s)
        before_s, used_s = used_s, channels.processor_s()
        if used_s is None or used_s - before_s < _IDLE_SHARE * reading_s:
            return
