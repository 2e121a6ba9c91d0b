"""Sandboxes: episodes with a time limit, metadata, and runners for processes and files of their guests.

A sandbox keeps its id when it is paused, which stores a checkpoint and ends its episode, and resumed, which opens
another one. Its time limit is kept here; if this process dies, the episode's lease ends it.
"""

import asyncio
import logging
import secrets
import string
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from cuaenv.client import AsyncEpisode, Checkpoint, View
from cuaenv.client.errors import EnvError
from envd.integrations.compat.callers import ProtocolSession, TokenHolder
from envd.integrations.compat.e2b.rpc import RpcError
from envd.integrations.compat.e2b.runner import GuestRunner

logger = logging.getLogger(__name__)

Fields = dict[str, Any]

NO_PIXELS: Final = View(encoding="none")
#: E2B's daemon in a sandbox; SDKs leave out what this version has not: files' metadata, entries in events.
ENVD_VERSION: Final = "0.5.7"
#: How long a paused sandbox is kept.
PAUSED_TTL: Final = timedelta(days=30)
_ALPHABET: Final = string.ascii_lowercase + string.digits


def new_id() -> str:
    """Return an id that cannot be guessed: it is what opens the ports of a sandbox."""
    return "i" + "".join(secrets.choice(_ALPHABET) for _ in range(19))


@dataclass(slots=True, kw_only=True)
class Sandbox(ProtocolSession):
    """A sandbox: running with an episode, or paused with a checkpoint."""

    limits_itself: ClassVar[bool] = True

    sandbox_id: str = field(default_factory=new_id)
    template_id: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    envs: dict[str, str] = field(default_factory=dict)
    pauses_at_end: bool = False
    access_token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    ends: datetime = field(default_factory=lambda: datetime.now(UTC))
    checkpoint: Checkpoint | None = None
    """State of a paused sandbox."""
    usage: Fields = field(default_factory=dict)
    """Size of the guest, as its runner reported it."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Pausing, resuming and ending exclude each other."""
    acting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Steps of an episode come one after the other."""
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    """Work that ends with its episode."""
    watchers: dict[str, "list[Fields]"] = field(default_factory=dict)
    _runners: dict[bool, GuestRunner] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    async def begin(self, episode: AsyncEpisode) -> None:
        """Run on an episode. Raises: EnvError, RpcError: its guest is not accessible; the episode is closed."""
        self.episode = episode
        self.checkpoint = None
        try:
            self.usage = await self.runner().ask("usage")
        except BaseException:
            await self.close_episode()
            raise

    def runner(self, user: str = "") -> GuestRunner:
        """Return the runner of a user of the guest: of its session, or root. Raises: RpcError: there is none."""
        if self.episode is None:
            raise RpcError("unavailable", f"the sandbox {self.sandbox_id} was not found")
        if user not in ("", "user", "root", self.usage.get("user", "")):
            raise RpcError("unauthenticated", f"invalid username: '{user}'; use root or user")
        as_root = user == "root"
        if as_root not in self._runners:
            self._runners[as_root] = GuestRunner(self.episode, as_root=as_root)
        return self._runners[as_root]

    def runners(self, user: str = "") -> list[GuestRunner]:
        """Return the runners that may have a process of a caller. Raises: RpcError."""
        return list(dict.fromkeys([self.runner(user), *self._runners.values()]))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start work that ends with its episode."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @asynccontextmanager
    async def tied(self) -> AsyncIterator[None]:
        """Cancel the block when its episode ends. Raises: RpcError: it did."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a block runs in a task")
        self.tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.episode is not None or task.uncancel():
                raise
            raise RpcError("unavailable", f"the sandbox {self.sandbox_id} was not found: it ended") from None
        finally:
            self.tasks.discard(task)

    def stop(self, name: str) -> None:
        """Cancel work by its name."""
        for task in list(self.tasks):
            if task.get_name() == name:
                task.cancel()

    async def close_episode(self) -> None:
        """End its runners and its episode; never fails."""
        runners, self._runners = list(self._runners.values()), {}
        self.watchers.clear()
        episode, self.episode = self.episode, None
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*(runner.aclose() for runner in runners), return_exceptions=True)
        if episode is not None:
            await episode.close()

    def end_after(self, caller: TokenHolder["Sandbox"], seconds: float) -> None:
        """Set the time limit, from now."""
        self.cancel_end()
        self.ends = datetime.now(UTC) + timedelta(seconds=seconds)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, lambda: caller.spawn(self._end(caller), f"end:{self.sandbox_id}"))

    def cancel_end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _end(self, caller: TokenHolder["Sandbox"]) -> None:
        if self.pauses_at_end and self.episode is not None:
            try:
                await self.pause()
            except EnvError as error:
                logger.warning("sandbox %s: could not be paused at its end and is killed: %s", self.sandbox_id, error)
            else:
                return
        await caller.close(self.sandbox_id)

    async def pause(self) -> bool:
        """Store its state and end its episode; return False if it is paused. Raises: EnvError: it continues."""
        async with self.changing:
            if self.episode is None:
                return False
            self.checkpoint = await self.episode.checkpoint(f"sandbox {self.sandbox_id}", ttl=PAUSED_TTL)
            self.cancel_end()
            await self.close_episode()
            return True

    async def resume(self, caller: TokenHolder["Sandbox"], timeout: timedelta, *, end_s: float) -> bool:
        """Open an episode in its state, for a time; return False if it runs.

        Raises:
            EnvError, RpcError: It stays paused.
        """
        async with self.changing:
            checkpoint = self.checkpoint
            if self.episode is not None or checkpoint is None:
                return False
            try:
                await self.begin(await caller.client.open(checkpoint, view=NO_PIXELS, timeout=timeout))
            except BaseException:
                self.checkpoint = checkpoint
                raise
            self.end_after(caller, end_s)
            await caller.client.delete_checkpoint(checkpoint)
            return True

    @property
    def is_paused(self) -> bool:
        return self.episode is None

    @property
    def created(self) -> Fields:
        """What a caller needs to reach it."""
        return {
            "templateID": self.template_id,
            "sandboxID": self.sandbox_id,
            "clientID": self.episode.episode_id if self.episode else "",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.access_token,
        }

    @property
    def listed(self) -> Fields:
        """What a list of sandboxes has of it."""
        mib = 1 << 20
        return {
            **{name: value for name, value in self.created.items() if name != "envdAccessToken"},
            "startedAt": wire_time(self.started),
            "endAt": wire_time(self.ends),
            "cpuCount": self.usage.get("cpuCount", 0),
            "memoryMB": self.usage.get("memTotal", 0) // mib,
            "diskSizeMB": self.usage.get("diskTotal", 0) // mib,
            "state": "paused" if self.is_paused else "running",
            "metadata": self.metadata,
        }


def wire_time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def metric(usage: Fields) -> Fields:
    """Return the guest's present use of its resources."""
    now = datetime.now(UTC)
    names = ("cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache", "diskUsed", "diskTotal")
    return {
        "timestamp": wire_time(now),
        "timestampUnix": int(now.timestamp()),
        **{name: usage.get(name, 0) for name in names},
    }
