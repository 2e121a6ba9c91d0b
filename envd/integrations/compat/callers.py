"""The callers of a protocol: for each token that the daemon accepts, a client of the daemon and its sessions.

The daemon decides what a token may do; this module decides only which client and sessions a request gets. One caller's
sessions are out of reach of another's token. A session without a call for 15 minutes loses its episode, so a client
that dies leaves nothing behind. If this process dies, its episodes' leases end them.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final, Generic, TypeVar

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint, Tls, View
from cuaenv.client.errors import EpisodeNotFound, PoolExhausted, RateLimited, Unauthenticated

#: The longest pause between two calls: these clients cannot renew a lease while their model thinks.
_EPISODE_IDLE_S: Final = 900.0
#: A session without a call for this long is removed.
_SESSION_IDLE_S: Final = 3600.0
_SWEEP_INTERVAL_S: Final = 30.0
_MAX_SESSIONS: Final = 1024
#: Bytes of the bodies that one caller's requests hold.
_MAX_HELD_BYTES: Final = 512 << 20
_ADMISSION_TIMEOUT: Final = timedelta(seconds=10)


@dataclass(slots=True, kw_only=True)
class ProtocolSession:
    """What one client of a protocol holds."""

    limits_itself: ClassVar[bool] = False
    """Whether it has a time limit of its own, and may be idle until then."""

    episode: AsyncEpisode | None = None
    """Its episode; None before the first, and once it was closed."""
    call_count: int = 0
    """Calls that run."""
    used_s: float = field(default_factory=time.monotonic)
    """Time of its latest call."""

    async def close_episode(self) -> None:
        """Close its episode, if it has one; never fails."""
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()


S = TypeVar("S", bound=ProtocolSession)
T = TypeVar("T")


class TokenHolder(Generic[S]):
    """The holder of one token, or everyone if the daemon requires none."""

    def __init__(self, client: AsyncEnvClient, *, max_steps: int) -> None:
        self.client = client
        self.sessions: dict[str, S] = {}
        self.task_ids: tuple[str, ...] = ()
        """Those of the daemon's tasks, when they were last listed."""
        self._max_steps = max_steps
        self._held_bytes = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Start work that outlives its request; it ends with this caller."""
        task = asyncio.create_task(work, name=f"compat:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Close all sessions and connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(session.close_episode() for session in self.sessions.values()))
        # A client closes the episodes that it opened.
        await self.client.aclose()

    async def open(
        self,
        task: str | Checkpoint,
        *,
        view: View,
        of_calls: bool = False,
        pool: str = "",
        timeout: timedelta = timedelta(minutes=10),
    ) -> AsyncEpisode:
        """Open an episode; a cancelled caller opens none.

        Args:
            task: Id of the task, or a checkpoint.
            view: Contents of its observations.
            of_calls: Whether its steps are calls of a protocol, of which an agent's step takes several: the limit of
                its steps is then the server's instead of the task's.
            pool: Name of the pool; empty for the task's own.
            timeout: Longest admission and setup.

        Raises:
            EnvError: See `AsyncEnvClient.reset_group`.
        """
        steps = self._max_steps if of_calls else 0
        return await self.client.open(task, view=view, max_steps=steps, pool=pool, timeout=timeout)

    async def add(self, session_id: str, session: S) -> None:
        """Add a session. Raises: PoolExhausted: the caller has too many; the session's episode is closed."""
        if len(self.sessions) >= _MAX_SESSIONS:
            await session.close_episode()
            raise PoolExhausted(
                f"sessions: {_MAX_SESSIONS} of one token are open; close some",
                code="RESOURCE_EXHAUSTED",
                reason="POOL_EXHAUSTED",
                retry_after=timedelta(seconds=10),
            )
        self.sessions[session_id] = session

    async def close(self, session_id: str) -> None:
        """Remove a session, and close its episode. Idempotent."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            await session.close_episode()

    @contextmanager
    def using(self, session_id: str) -> Iterator[S]:
        """Yield a session, which counts as in use during the block. Raises: EpisodeNotFound: there is none."""
        session = self.sessions.get(session_id)
        if session is None:
            raise not_found(session_id)
        session.call_count += 1
        try:
            yield session
        finally:
            session.call_count -= 1
            session.used_s = time.monotonic()

    @contextmanager
    def using_episode(self, session_id: str) -> Iterator[AsyncEpisode]:
        """Yield a session's episode. Raises: EpisodeNotFound: there is no session, or it has no episode."""
        with self.using(session_id) as session:
            if session.episode is None:
                raise not_found(session_id)
            yield session.episode

    @contextmanager
    def holding(self, byte_count: int) -> Iterator[None]:
        """Count bytes as held during the block. Raises: RateLimited: with them it would hold too many."""
        if self._held_bytes + byte_count > _MAX_HELD_BYTES:
            raise RateLimited(
                f"requests of one token hold {self._held_bytes} bytes, at most {_MAX_HELD_BYTES}; retry later",
                code="RESOURCE_EXHAUSTED",
                reason="RATE_LIMITED",
                retry_after=timedelta(seconds=1),
            )
        self._held_bytes += byte_count
        try:
            yield
        finally:
            self._held_bytes -= byte_count


class Callers(Generic[S]):
    """All callers of one protocol, at one daemon or several."""

    def __init__(self, targets: str, *, tls: Tls | None = None, max_steps: int = 1000) -> None:
        """Prepare; no call is made yet.

        Args:
            targets: Of the daemon, in the form that `AsyncEnvClient` takes.
            tls: Files for an encrypted connection to it.
            max_steps: Most steps of an episode whose steps are calls of a protocol; at most the daemon's
                `limits.max_steps`.
        """
        self._targets = targets
        self._tls = tls
        self._max_steps = max_steps
        self._by_token: dict[str, TokenHolder[S]] = {}
        self.requires_token = True
        """Whether the daemon requires tokens; known after `start`."""
        self.capacity = 0
        """Most machines of the daemon's pools, as of the newest caller."""

    async def start(self) -> None:
        """Find out whether the daemon requires tokens. Raises: EnvError: it cannot be reached."""
        try:
            await self._admit("")
        except Unauthenticated:
            self.requires_token = True
        else:
            self.requires_token = False

    async def identify(self, tokens: Sequence[str]) -> TokenHolder[S]:
        """Return the caller that a request's tokens name.

        Raises:
            Unauthenticated: The daemon requires a token, and there is none, an unknown one or several.
            EnvError: The daemon cannot be reached.
        """
        if not self.requires_token:
            return self._by_token[""]
        if len(tokens) != 1:
            raise _unauthenticated("a request needs exactly one token of the daemon")
        return self._by_token.get(tokens[0]) or await self._admit(tokens[0])

    async def forget(self, caller: TokenHolder[S]) -> None:
        """Drop a caller whose token the daemon no longer accepts; leases end its episodes."""
        for token, each in list(self._by_token.items()):
            if each is caller and self.requires_token:
                del self._by_token[token]
                await caller.aclose()

    def holder_of(self, session_id: str) -> TokenHolder[S] | None:
        """Return the caller that has a session, for requests that a secret of the session admits."""
        return next((caller for caller in self._by_token.values() if session_id in caller.sessions), None)

    def sessions(self) -> Iterator[S]:
        """Yield the sessions of all callers."""
        for caller in self._by_token.values():
            yield from caller.sessions.values()

    def session_count(self) -> int:
        return sum(len(caller.sessions) for caller in self._by_token.values())

    def episode_count(self) -> int:
        return sum(session.episode is not None for session in self.sessions())

    async def keep_swept(self) -> None:
        """Release what no client has used for long, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Close the episodes of idle sessions, and remove the sessions that were idle for an hour."""
        now_s = time.monotonic()
        idle: list[S] = []
        for caller in self._by_token.values():
            for session_id, session in list(caller.sessions.items()):
                if session.limits_itself:
                    continue
                if session.call_count == 0 and now_s - session.used_s >= _EPISODE_IDLE_S:
                    idle.append(session)
                    if now_s - session.used_s >= _SESSION_IDLE_S:
                        del caller.sessions[session_id]
        await asyncio.gather(*(session.close_episode() for session in idle))

    async def aclose(self) -> None:
        """Close all episodes and connections."""
        callers = list(self._by_token.values())
        self._by_token.clear()
        await asyncio.gather(*(caller.aclose() for caller in callers))

    async def _admit(self, token: str) -> TokenHolder[S]:
        """Return the caller with a token that was not seen before, which a call proves. Raises: EnvError."""
        try:
            client = AsyncEnvClient(self._targets, token=token, tls=self._tls)
        except ValueError as error:
            raise _unauthenticated(str(error)) from None
        caller = TokenHolder[S](client, max_steps=self._max_steps)
        try:
            pools = await client.list_pools(timeout=_ADMISSION_TIMEOUT)
            self.capacity = sum(pool.capacity for pool in pools)
            # Another request with the token may have been first.
            return self._by_token.setdefault(token, caller)
        finally:
            if self._by_token.get(token) is not caller:
                await client.aclose()


def not_found(session_id: str) -> EpisodeNotFound:
    """Return the error for a session or episode that a caller does not have."""
    return EpisodeNotFound(
        f"{session_id}: not found (unknown, closed, of another token, or without a call for"
        f" {_EPISODE_IDLE_S / 60:.0f} minutes); open another",
        code="NOT_FOUND",
        reason="EPISODE_NOT_FOUND",
    )


def _unauthenticated(message: str) -> Unauthenticated:
    error = Unauthenticated(message, code="UNAUTHENTICATED", reason="UNAUTHENTICATED")
    error.remedy = ""  # the client's own names its arguments
    return error
