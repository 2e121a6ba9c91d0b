"""People act in episodes: they take control, act without waiting for the screen, and hand back.

Each act is performed at once. What a person did is recorded as steps, once the input pauses and the screen is settled.
The steps are the person's: they do not count toward those of the agent.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cuaenv.actions import Action, MouseDown, MouseUp
from envd.base.aio import OwnedTasks
from envd.base.errors import EnvdError, EpisodeEnded, HumanInControl
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.observation import ActionOutcome
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.progress import EpisodeState, merged

logger = logging.getLogger(__name__)

#: How long a person controls an episode without a renewal; the page renews a third of its lease earlier.
CONTROL_TTL_S = 30.0
#: A pause of the input ends a step, unless a button is held.
_PAUSE_S = 0.6
#: Input without a pause is cut into steps of this length.
_MAX_PENDING = 200


@dataclass(eq=False, slots=True)
class _Session:
    """One person's control, from the first `take` until it is handed back or expires."""

    pending: list[tuple[Action, ActionOutcome]] = field(default_factory=list)
    """What was performed since the last recorded step."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_dragging(self) -> bool:
        """Whether a button is held: a pause then is part of a drag."""
        buttons = [action for action, _ in self.pending if isinstance(action, MouseDown | MouseUp)]
        return bool(buttons) and isinstance(buttons[-1], MouseDown)


class Controlling:
    """The calls of people, of an episode service."""

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context
        self._tasks = OwnedTasks()
        self._sessions: dict[str, _Session] = {}

    def take(self, episode_id: str, *, control_id: str, holder: str) -> float:
        """Take control of an active episode, or renew it; return the seconds until it expires. Renews the lease.

        Raises:
            EpisodeNotFound: No such episode.
            EpisodeEnded: It is not active.
            MachineLost: The machine is gone.
            HumanInControl: Another person controls it.
        """
        episode = self._context.registry.get(episode_id)
        episode.require_machine()
        if episode.progress.state is not EpisodeState.ACTIVE:
            state = episode.progress.state.value
            raise EpisodeEnded(f"episode {episode_id}: {state}; only active episodes can be controlled")
        human, now_s = episode.human, self._context.clock.monotonic()
        if human.control_id not in ("", control_id):
            raise HumanInControl(
                f"episode {episode_id}: {human.holder or 'another page'} controls it",
                retry_after_s=max(1.0, human.expire_s - now_s),
            )
        if not human.control_id:
            session = self._sessions[episode_id] = _Session()
            self._tasks.spawn(self._hold(episode, session), name=f"control:{episode_id}")
        human.control_id, human.holder, human.expire_s = control_id, holder, now_s + CONTROL_TTL_S
        episode.lease.renew(now_s)
        return CONTROL_TTL_S

    async def act(self, episode_id: str, *, control_id: str, actions: Sequence[Action]) -> list[ActionOutcome]:
        """Perform actions at once, without waiting until the screen is settled.

        Raises:
            HumanInControl: The caller does not control the episode, or no longer.
            GuestUnresponsive, GuestError: The guest failed; the episode is void.
        """
        context = self._context
        episode = context.registry.get(episode_id)
        async with context.call(episode), episode.lock:
            episode.human.require_holder(episode_id, control_id)
            episode.require_machine()
            session = self._sessions[episode_id]
            try:
                async with episode.machine.running():
                    outcomes = [await episode.machine.desktop.act(action) for action in actions]
            except EnvdError as error:
                raise await context.registry.lose(episode, error) from error
            episode.person_acted(actions)
            context.journal.save(episode)
            session.pending += zip(actions, outcomes, strict=True)
            session.changed.set()
        return outcomes

    async def release(self, episode_id: str, *, control_id: str) -> None:
        """Hand back. Does nothing if the caller has no control."""
        episode = self._context.registry.find(episode_id)
        if episode is None or not control_id or episode.human.control_id != control_id:
            return
        session = self._sessions[episode_id]
        async with episode.lock:
            try:
                await self._record(episode, session)
            finally:
                self._end(episode, session)

    async def before_rollback(self, episode: Episode, control_id: str) -> None:
        """Check that a caller may roll an episode back, and record what the person did until now. Hold the lock.

        An empty `control_id` is the agent's. Raises: HumanInControl.
        """
        episode.human.require(episode.episode_id, control_id)
        if control_id:
            await self._record(episode, self._sessions[episode.episode_id])

    async def aclose(self) -> None:
        """End all control."""
        await self._tasks.cancel()

    def _end(self, episode: Episode, session: _Session) -> None:
        if self._sessions.get(episode.episode_id) is session:
            del self._sessions[episode.episode_id]
            episode.human.control_id = ""
        session.changed.set()

    async def _hold(self, episode: Episode, session: _Session) -> None:
        """Keep the guest running and record steps, until control is handed back, expires, or the episode ends."""
        clock = self._context.clock
        try:
            while self._holds(episode, session):
                # A person's episode is not parked again.
                async with self._context.call(episode):
                    pass
                async with self._context.running(episode, Stopwatch(clock)) as machine:
                    # After a rollback the episode has another machine.
                    while self._holds(episode, session) and machine is episode.machine:
                        session.changed.clear()
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_PAUSE_S):
                                await session.changed.wait()
                            if len(session.pending) < _MAX_PENDING:
                                continue
                        await self._record_locked(episode, session)
                    await self._record_locked(episode, session, is_last=True)
        except EnvdError as error:
            logger.info("episode %s: control ends: %s", episode.episode_id, error)
        finally:
            self._end(episode, session)

    def _holds(self, episode: Episode, session: _Session) -> bool:
        is_present = self._sessions.get(episode.episode_id) is session and not episode.closed.is_set()
        return is_present and self._context.clock.monotonic() < episode.human.expire_s

    async def _record_locked(self, episode: Episode, session: _Session, *, is_last: bool = False) -> None:
        if session.pending and not episode.closed.is_set():
            async with episode.lock:
                # With the lock: the act that held it before may have been a press.
                if is_last or len(session.pending) >= _MAX_PENDING or not session.is_dragging:
                    await self._record(episode, session)

    async def _record(self, episode: Episode, session: _Session) -> None:
        """Report what the person did since the last step, with the settled screen. The caller holds the lock."""
        performed, session.pending = session.pending, []
        if not performed:
            return
        watch = Stopwatch(self._context.clock)
        settled = await episode.machine.desktop.settle(self._context.settle_policy(episode, None))
        actions = merged(action for action, outcome in performed if not outcome.error)
        self._context.registry.events.driven(
            episode,
            [
                *((action, "") for action in actions),
                *((each, outcome.error) for each, outcome in performed if outcome.error),
            ],
            is_settled=settled.settled,
            total_ms=watch.total_ms,
            time=self._context.clock.now(),
        )
