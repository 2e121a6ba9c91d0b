"""The session layer of all protocols: opens, steps, scores and closes episodes of the daemon's own service.

It keeps nothing that an episode's state depends on, so episodes are bounded by their leases and by the pools' queues
alone: no protocol can evict a live episode, and a client that dies leaves nothing behind.
"""

import math
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from cuaenv.actions import Action, Done, Fail, Wait
from cuaenv.agent_text.pyautogui_calls import parse_calls
from cuaenv.agent_text.values import ParseError
from envd.api.convert_requests import guest_path_of
from envd.api.security.access import Caller
from envd.base.errors import EpisodeEnded, GuestError, GuestRefused, InvalidRequest, PoolExhausted, TaskNotFound
from envd.desktop.observation import CursorMode, Encoding, Observation, ObservationOptions
from envd.episodes.registry import unknown_episode
from envd.episodes.service import EpisodeService
from envd.episodes.types import EpisodeInfo, EpisodeState, GroupResult, ResetCommand, StepCommand
from envd.tasks.formats.entries import task_name
from envd.tasks.model import Task

#: The longest pause between two calls: these clients cannot renew a lease while their model thinks.
_LEASE_TTL_S = 900.0
_MAX_PAUSE_S = 60.0
_MIN_WAIT_S = 0.1
#: Sessions of one caller in a protocol that has sessions without episodes.
_MAX_SESSIONS = 1024
#: A session without a call for this long is removed; its episode's lease expired long before.
_IDLE_S = 3600.0
T = TypeVar("T")

_NOTHING = ObservationOptions(encoding=Encoding.NONE, cursor=CursorMode.REPORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """The result of an action in an agent's own words."""

    info: EpisodeInfo
    observation: Observation
    error: str
    """The agent's mistake; empty if there is none."""

    @property
    def done(self) -> bool:
        return self.info.state is not EpisodeState.ACTIVE


class Owned(Protocol):
    """What belongs to a caller."""

    owner: str


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Owned)


class SessionTable(Generic[K, S]):
    """A protocol's sessions by key: bounded for each caller, and removed once idle for an hour."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[K, tuple[float, S]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: K) -> S | None:
        found = self._sessions.get(key)
        return found[1] if found is not None else None

    def add(self, key: K, session: S) -> None:
        """Add a session, used now. Raises: PoolExhausted: its owner has too many."""
        idle_since_s = time.monotonic() - _IDLE_S
        # In order of their last use.
        while self._sessions and next(iter(self._sessions.values()))[0] < idle_since_s:
            self.remove(next(iter(self._sessions)))
        if self._counts[session.owner] >= _MAX_SESSIONS:
            raise PoolExhausted(f"sessions: {_MAX_SESSIONS} of one token are open; close some", retry_after_s=10.0)
        self._counts[session.owner] += 1
        self._sessions[key] = (time.monotonic(), session)

    def touch(self, key: K) -> None:
        self._sessions[key] = (time.monotonic(), self._sessions[key][1])
        self._sessions.move_to_end(key)

    def remove(self, key: K) -> None:
        found = self._sessions.pop(key, None)
        if found is not None:
            self._counts[found[1].owner] -= 1


class Sessions:
    """Episodes for the clients of one daemon."""

    def __init__(self, service: EpisodeService, *, max_lease_ttl_s: float, max_steps: int) -> None:
        self._service = service
        self._lease_ttl_s = min(_LEASE_TTL_S, max_lease_ttl_s)
        self._max_steps = max_steps

    @property
    def capacity(self) -> int:
        return sum(pool.capacity for pool in self._service.list_pools())

    def episode_count(self, caller: Caller | None = None) -> int:
        """Return the number of open episodes, of all owners or of those that the caller may list."""
        return sum(caller is None or caller.may_list(info.owner) for info in self._service.list_episodes())

    def task_of(self, config: dict[str, object]) -> Task:
        """Return the daemon's task for the configuration that a client sends with a reset.

        Only the daemon's own task files decide what an episode sets up and checks.

        Raises:
            InvalidRequest: It has no id, or its instruction differs from the daemon's.
            TaskNotFound: No loaded task has its id.
        """
        given = config.get("id")
        if not isinstance(given, str) or not given:
            raise InvalidRequest("task_config.id", "is not a task's id; send the task's JSON with its id")
        task = self._find(given)
        instruction = config.get("instruction")
        if instruction is not None and instruction != task.instruction:
            raise InvalidRequest(
                "task_config.instruction",
                f"differs from that of the daemon's task {task.task_id}; give both the same task files",
            )
        return task

    def _find(self, given: str) -> Task:
        tasks = self._service.tasks
        if "/" in given:
            return tasks.get(given)
        ending = f"/{task_name(given)}"
        found = [task for task in tasks.list() if task.task_id.endswith(ending)]
        if not found:
            raise TaskNotFound(f"task {given!r}: not found; load it with --tasks or `envd osworld install --tasks`")
        if len(found) > 1:
            several = ", ".join(task.task_id for task in found[:3])
            raise InvalidRequest("task_config.id", f"{given!r} fits {several}; send one of these ids")
        return found[0]

    async def open(
        self,
        caller: Caller,
        task_id: str,
        *,
        observe: ObservationOptions,
        request_id: str = "",
        unlimited: bool = False,
    ) -> GroupResult:
        """Open an episode; a cancelled caller opens none.

        Args:
            request_id: Same id, same episode; empty for a new one.
            unlimited: Allow the daemon's maximum of steps, for a protocol whose calls are not an agent's steps.

        Raises: See `Opening.reset`.
        """
        command = ResetCommand(
            request_id=request_id or uuid.uuid4().hex,
            task_id=task_id,
            owner=caller.name,
            max_machines=caller.max_machines,
            lease_ttl_s=self._lease_ttl_s,
            max_steps=self._max_steps if unlimited else None,
            observe=observe,
        )
        return await self._service.reset(command)

    async def info(self, episode_id: str) -> EpisodeInfo:
        """Return an open episode and renew its lease. Raises: EpisodeNotFound."""
        infos = await self._service.keep_alive([episode_id], None)
        if not infos:
            raise unknown_episode(episode_id)
        return infos[0]

    async def is_active(self, episode_id: str) -> bool:
        """Return whether an episode takes steps, and renew its lease."""
        infos = await self._service.keep_alive([episode_id], None)
        return any(info.state is EpisodeState.ACTIVE for info in infos)

    def instruction_of(self, info: EpisodeInfo) -> str:
        return self._service.tasks.get(info.task_id).instruction

    async def step(self, episode_id: str, actions: Sequence[Action], *, observe: ObservationOptions) -> Acted:
        """Perform actions. Raises: see `Stepping.step`."""
        info = await self.info(episode_id)
        command = StepCommand(
            request_id=uuid.uuid4().hex,
            episode_id=episode_id,
            step_index=info.step_count,
            actions=tuple(actions),
            observe=observe,
        )
        result = await self._service.step(command)
        mistakes = [outcome.error for outcome in result.outcomes if outcome.error]
        return Acted(info=result.episode, observation=result.observation, error="; ".join(mistakes))

    async def act(self, episode_id: str, action: str, *, pause_s: float, observe: ObservationOptions) -> Acted:
        """Perform an action in OSWorld's form: pyautogui calls with literal arguments, or WAIT, DONE or FAIL.

        Text that is neither is the agent's mistake: nothing is performed, and the episode continues.

        Args:
            action: The text; it is parsed and never executed.
            pause_s: How long WAIT waits. After other actions the screen settles instead.

        Raises:
            InvalidRequest: The pause is not a number of 0 to 60 s.
        """
        if not (math.isfinite(pause_s) and 0 <= pause_s <= _MAX_PAUSE_S):
            raise InvalidRequest("pause", f"{pause_s} is not a number of 0 to {_MAX_PAUSE_S:g} seconds")
        info = await self.info(episode_id)
        try:
            actions = _actions_of(action, pause_s=pause_s, pointer=await self._pointer(episode_id))
        except (ParseError, RecursionError, MemoryError) as mistake:
            if info.state is not EpisodeState.ACTIVE:
                raise EpisodeEnded(
                    f"episode {episode_id}: ended after step {info.step_count} ({info.end_reason}); reset a new one"
                ) from mistake
            observation = await self.observe(episode_id, observe)
            return Acted(info=info, observation=observation, error=f"invalid action: {mistake}")
        return await self.step(episode_id, actions, observe=observe)

    async def _pointer(self, episode_id: str) -> tuple[int, int] | None:
        frame = (await self._service.observe(episode_id, _NOTHING)).frame
        return (frame.cursor.x_px, frame.cursor.y_px) if frame.cursor is not None else None

    async def observe(self, episode_id: str, options: ObservationOptions) -> Observation:
        """Return the present screen, once it has settled. Raises: see `Stepping.observe`."""
        return await self._service.observe(episode_id, options, refresh=True)

    async def evaluate(self, episode_id: str) -> float:
        """Score an episode; the checkers run once, and later calls return the same score.

        Raises: See `Evaluating.evaluate`. An error has no score.
        """
        result = await self._service.evaluate(episode_id, request_id="compat-evaluate", fingerprint=b"compat-evaluate")
        return result.score

    async def read_file(self, episode_id: str, path: str, *, max_bytes: int) -> bytes:
        """Return a guest file. Raises: see `GuestAccess.read_file`."""
        try:
            return await self._service.read_file(episode_id, guest_path_of(path), max_bytes=max_bytes)
        except GuestError as error:
            raise GuestRefused(str(error)) from error

    async def with_guest_service(self, episode_id: str, work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """Run work with the URL of the guest's service. Raises: see `GuestAccess.with_guest_service`."""
        try:
            return await self._service.with_guest_service(episode_id, work)
        except GuestError as error:
            raise GuestRefused(str(error)) from error

    async def close(self, caller: Caller, episode_id: str) -> None:
        """End an episode and destroy its machine. Idempotent; without effect for an episode of another caller."""
        if caller.may_use(self._service.owner_of(episode_id)):
            await self._service.close(episode_id)


def _actions_of(text: str, *, pause_s: float, pointer: tuple[int, int] | None) -> list[Action]:
    """Return the actions of an agent's text. Raises: ParseError, RecursionError, MemoryError."""
    match text.strip().upper():
        case "DONE":
            return [Done()]
        case "FAIL":
            return [Fail()]
        case "WAIT":
            return [Wait(timedelta(seconds=max(pause_s, _MIN_WAIT_S)))]
    actions = [call.action for call in parse_calls(text, pointer=pointer)]
    if not actions:
        raise ParseError("there is no call")
    return actions
