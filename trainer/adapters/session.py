"""One episode as frameworks use it: open by task or row, act, see a picture, get a score or the reason for none.

A fault of ours never becomes a score. It voids the session: the call raises `SessionVoid`, `Session.score` returns a
`Score` without a value, and the machine is released. A mistake of the caller is an `EnvError` and harms nothing.

The episode is closed when the session is closed, void, scored or idle for too long, when its loop ends, or when opening
it is cancelled.

Frameworks open the members of a group one by one. Sessions with an equal group key join one group of forks: the first
opens all of them, the others take theirs, and the forks of members that never come are closed after `group_wait`.
"""

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cuaenv.client import (
    Action,
    AsyncEpisode,
    BadRequest,
    Check,
    Checkpoint,
    ClientSettings,
    Done,
    EnvError,
    EpisodeEnded,
    Fail,
    GuestEnded,
    Observation,
    PressKeys,
    Settle,
    State,
    StepResult,
    Tls,
    TypeText,
    View,
    shared_client,
)
from trainer.agent.coordinates import points_of
from trainer.agent.groups import GroupMember, Groups
from trainer.agent.ownership import GUEST_ENDED, failure_of, is_fault, reward_of
from trainer.agent.starts import start_of, step_limit
from trainer.rewards.facts import ActionFacts, Breakdown, EpisodeFacts, TurnFacts
from trainer.rewards.recipes import Recipe, recipe_of

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

T = TypeVar("T")
#: Column of a row with the task's id.
TASK_COLUMN = "task_id"
#: Column of a row with the key of its group.
GROUP_COLUMN = "group"
_DEFAULT_TARGET = "127.0.0.1:50051"


class SessionVoid(EnvError):
    """The session was lost to a fault of ours. It has no score; do not train on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Where and how sessions are opened.

    Raises:
        ValueError: A value is out of range.
    """

    client: ClientSettings
    """The daemons, the token and the run."""
    pool: str = ""
    """Pool to use; empty for the task's own."""
    max_steps: int = 0
    """Steps after which an episode is truncated; 0 for the task's own limit."""
    view: View = field(default_factory=View)
    """Contents of pictures. Points of actions are pixels of the picture, also if it is scaled."""
    settle: Settle | None = None
    """The rule by which a screen counts as settled; None for the pool's own rule."""
    lease_ttl: timedelta = timedelta(minutes=5)
    """How long machines outlive this process."""
    reset_timeout: timedelta = timedelta(minutes=10)
    step_timeout: timedelta = timedelta(minutes=3)
    evaluate_timeout: timedelta = timedelta(minutes=15)
    group_size: int = 1
    """Members of a group, which start on forks of one state; 1 to open each session alone."""
    group_wait: timedelta = timedelta(minutes=1)
    """How long a group keeps a machine for a member that has not come."""
    reward: str | Mapping[str, Any] = "task"
    """The reward in training, as for slime: a name, `module:NAME`, or `recipe:` with options. A session has no replies:
    the facts of its turns are those of its steps, without texts."""
    ended_by_guest_score: float = -0.1
    """Reward in training if the agent ended its guest without solving the task; see `docs/rewards.md`."""
    idle_timeout: timedelta = timedelta(hours=1)
    """A session without a call for this long is void, and its machine is released."""
    _recipe: Recipe = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; it must be at least 1")
        if self.view.region is not None:
            raise ValueError("view.region: points of actions would not match a cropped picture; remove it")
        object.__setattr__(self, "_recipe", recipe_of(self.reward))

    def reward_of(self, facts: EpisodeFacts) -> Breakdown:
        """Return the reward of an episode in training. Raises: ExtensionError."""
        return reward_of(facts, self._recipe, ended_by_guest_score=self.ended_by_guest_score)

    @classmethod
    def connect(
        cls,
        envd: str = "",
        *,
        run: str = "",
        token: str | None = None,
        tls_ca: "Path | None" = None,
        max_episodes: int | None = None,
        **options: Any,
    ) -> Self:
        """Return settings for a daemon.

        Args:
            envd: `HOST:PORT`, or several with commas; by default the variable `ENVD_TARGET`, or else this host.
            run: Label of the episodes, for fair share and metrics.
            token: By default the variable `ENVD_TOKEN`.
            tls_ca: Certificate of the authority that signed the daemon's; enables TLS.
            max_episodes: Most episodes at once; further sessions wait here.

        Raises:
            ValueError: A value is out of range.
        """
        targets = (envd or os.environ.get("ENVD_TARGET") or _DEFAULT_TARGET).split(",")
        tls = None if tls_ca is None else Tls(ca=tls_ca)
        client = ClientSettings(
            targets=tuple(targets), run=run, token=token, tls=tls, max_episodes=max_episodes, expects_idle=True
        )
        return cls(client=client, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of a session."""

    value: float | None
    """A value in [0, 1]; None if the session is void."""
    reward: float | None = None
    """The value for training, by `SessionSettings.reward`; None if the session is void."""
    guest_end_cause: str = ""
    """Cause, such as POWER_OFF, if the agent ended its guest; otherwise empty."""
    void: str = ""
    """Why there is no value; empty if there is one."""
    checks: tuple[Check, ...] = ()
    """The task's checks, with evidence."""


class Session:
    """One episode. Concurrent calls take turns."""

    def __init__(self, episode: AsyncEpisode, settings: SessionSettings) -> None:
        """Use `open_session`."""
        self.episode = episode
        """The client's episode; use it to read. Its calls bypass the session."""
        self.void = ""
        """Why the session is void; empty if it is not."""
        self._settings = settings
        self._turn = asyncio.Lock()
        self._score: Score | None = None
        self._guest_ended = False
        self._turns: list[TurnFacts] = []
        self._was_closed = False
        self._idle: asyncio.TimerHandle | None = None
        self._watch_idle()

    def __repr__(self) -> str:
        return f"<Session {self.episode!r}{' void' if self.void else ''}>"

    @property
    def instruction(self) -> str:
        return self.episode.instruction

    @property
    def observation(self) -> Observation:
        return self.episode.observation

    @property
    def screenshot(self) -> "Image.Image":
        """The latest picture. Raises: ValueError: it has no pixels."""
        return self.observation.image

    @property
    def done(self) -> bool:
        """Whether the session takes no more steps."""
        return self.episode.state is not State.ACTIVE or self._guest_ended or self.episode.is_closed

    @property
    def truncated(self) -> bool:
        """Whether the episode was ended by a limit, not by the agent."""
        return self.episode.state is State.TRUNCATED

    async def step(self, *actions: Action) -> StepResult:
        """Perform actions in order, wait for the screen to settle, and observe.

        Raises:
            SessionVoid: The episode was lost.
            EnvError: The request is invalid, or the episode has ended; nothing was done.
        """
        async with self._call():
            seen = self.episode.observation
            try:
                result = await self.episode.step(
                    *actions, coordinate_space=(seen.width_px, seen.height_px), timeout=self._settings.step_timeout
                )
            except GuestEnded:
                self._guest_ended = True
                return _ended_before(self.episode, len(actions))
            except (ValueError, TypeError, KeyError) as error:
                raise BadRequest(f"episode {self.episode.episode_id}: malformed action: {error}") from error
            if result.state is State.FAILED:
                raise failure_of(self.episode.episode_id, result.end_reason)
            errors = (_in_picture(*each, seen) for each in zip(actions, result.action_errors, strict=True))
            self._turns.append(_turn_of(actions, result))
            return replace(result, action_errors=tuple(errors))

    async def observe(self) -> Observation:
        """Observe without acting. Raises: those of `step`."""
        async with self._call():
            return await self.episode.observe(settle=self._settings.settle)

    async def call(self, work: Callable[[AsyncEpisode], Awaitable[T]]) -> T:
        """Perform another call of the episode, such as `AsyncEpisode.read_file`. Raises: those of `step`."""
        async with self._call():
            return await work(self.episode)

    async def checkpoint(self, label: str = "") -> Checkpoint:
        """Store the present state, for `rollback` and `open_session`. Raises: those of `step`."""
        return await self.call(lambda episode: episode.checkpoint(label))

    async def rollback(self, checkpoint: Checkpoint) -> Observation:
        """Go back to a checkpoint, also after the last step. Raises: those of `step`."""
        return await self.call(lambda episode: episode.rollback(checkpoint))

    async def score(self) -> Score:
        """Score the episode once, end it and release its machine; without a value if the session is void.

        Raises:
            EnvError: The session was closed before, or the request was refused.
            ExtensionError: The own reward of the settings failed; the machine is released.
        """
        if self._score is None:
            try:
                async with self._call():
                    evaluation = await self.episode.evaluate(timeout=self._settings.evaluate_timeout)
                    cause = evaluation.guest_end_cause or (GUEST_ENDED if self._guest_ended else "")
                    self._begin_close()
                    facts = EpisodeFacts(
                        task_id=self.episode.task_id,
                        task_score=evaluation.score,
                        turns=tuple(self._turns),
                        max_turns=self.episode.max_steps or max(1, len(self._turns)),
                        truncated=self.truncated,
                        guest_end_cause=cause,
                    )
                    self._score = Score(
                        value=evaluation.score,
                        reward=self._settings.reward_of(facts).total,
                        guest_end_cause=cause,
                        checks=evaluation.checks,
                    )
            except SessionVoid:
                self._score = Score(value=None, void=self.void)
            except EpisodeEnded:
                # A concurrent call may have scored it.
                if self._score is None:
                    raise
        return self._score

    async def close(self) -> None:
        """Release the machine. Idempotent; never fails, and is completed even if the caller is cancelled."""
        self._begin_close()
        await self.episode.close()

    def _begin_close(self) -> None:
        self._was_closed = True
        self._stop_watching_idle()
        self.episode.begin_close()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        async with self._turn:
            self._require_open()
            self._stop_watching_idle()
            try:
                yield
            except EnvError as error:
                self._guest_ended = self._guest_ended or isinstance(error, GuestEnded)
                if is_fault(error):
                    self._lose(f"{error.reason or type(error).__name__}: {error}")
                    raise SessionVoid(self.void, code=error.code, reason=error.reason, host=error.host) from error
                raise
            except asyncio.CancelledError:
                self._lose("cancelled during a call, whose effect is unknown")
                raise
            finally:
                if not self.episode.is_closed:
                    self._watch_idle()

    def _require_open(self) -> None:
        if not self.episode.is_closed:
            return
        episode = f"episode {self.episode.episode_id}"
        if not self.void and self._was_closed:
            raise EpisodeEnded(f"{episode}: the session is closed; open another")
        self.void = self.void or f"{episode}: closed with its event loop"
        raise SessionVoid(self.void)

    def _lose(self, reason: str) -> None:
        self.void = self.void or reason
        self._begin_close()

    def _watch_idle(self) -> None:
        idle_s = self._settings.idle_timeout.total_seconds()
        reason = f"episode {self.episode.episode_id}: closed after {idle_s:g} s without a call"
        self._idle = asyncio.get_running_loop().call_later(idle_s, self._lose, reason)

    def _stop_watching_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()


def _turn_of(actions: Sequence[Action], result: StepResult) -> TurnFacts:
    """Return the facts of a step; without points, which are in the picture's pixels."""
    change = result.screen_change
    return TurnFacts(
        text="",
        parsed=True,
        actions=tuple(
            ActionFacts(
                kind=type(action).__name__,
                arguments={name: value for name, value in asdict(action).items() if value is not None},
                text=action.text if isinstance(action, TypeText) else None,
                keys=tuple(action.keys) if isinstance(action, PressKeys) else (),
                executed=not error,
            )
            for action, error in zip(actions, result.action_errors, strict=True)
        ),
        errors=result.errors,
        done=any(isinstance(action, Done) for action in actions),
        failed=any(isinstance(action, Fail) for action in actions),
        changed_fraction=None if change is None else change.changed_fraction,
        grey_difference=None if change is None else change.grey_difference,
    )


def _in_picture(action: Action, error: str, seen: Observation) -> str:
    """Return an action's error; of a point outside of the picture, in the picture's pixels instead of the screen's."""
    outside = [(x, y) for x, y in points_of(action) if not (0 <= x < seen.width_px and 0 <= y < seen.height_px)]
    if not error or not outside:
        return error
    return f"point {outside[0]} is outside of the picture, which is {seen.width_px}x{seen.height_px} pixels"


def _ended_before(episode: AsyncEpisode, action_count: int) -> StepResult:
    """Return the result of a step that was not performed because the guest had ended itself."""
    return StepResult(
        observation=episode.observation,
        action_errors=("the machine is off",) * action_count,
        state=State.TERMINATED,
        end_reason=GUEST_ENDED,
        step_count=episode.step_count,
        timings_ms={},
        screen_change=None,
        replayed=False,
        guest_end_cause=episode.guest_end_cause,
    )


_groups: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Groups] = weakref.WeakKeyDictionary()


async def open_session(
    task: str | Mapping[str, Any] | Checkpoint, *, settings: SessionSettings, group: Hashable | None = None
) -> Session:
    """Open an episode; the caller closes it.

    Args:
        task: Id of the task, or a row with the columns `task_id` and, optionally, `group`, or one of `trainer data
            states`, to start in its state. Or a checkpoint to continue from, alone and with its step limit.
        group: Key of the session's group; by default that of the row, or else the task's id.

    Raises:
        EnvError: It could not be opened; see `is_fault`.
        ValueError: The row has no task id, or a malformed checkpoint.
    """
    start: str | Checkpoint
    if isinstance(task, Mapping):
        group = task.get(GROUP_COLUMN) if group is None else group
        start = start_of({**(task.get("metadata") or {}), **task}, task_of_row(task))
    else:
        start = task
    if isinstance(task, Checkpoint):
        settings = replace(settings, group_size=1, pool="", max_steps=0)
    member = GroupMember(
        shared_client(settings.client),
        # A framework may run several loops, each in its own thread.
        _groups.setdefault(asyncio.get_running_loop(), Groups()),
        group=(start if group is None else group, settings.client),
        size=settings.group_size,
        wait_s=settings.group_wait.total_seconds(),
    )
    episode = await member.reset(
        start,
        pool=settings.pool,
        max_steps=step_limit(start, settings.max_steps),
        view=settings.view,
        settle=settings.settle,
        lease_ttl=settings.lease_ttl,
        timeout=settings.reset_timeout,
    )
    return Session(episode, settings)


@asynccontextmanager
async def session(
    task: str | Mapping[str, Any] | Checkpoint, *, settings: SessionSettings, group: Hashable | None = None
) -> AsyncIterator[Session]:
    """Open an episode, and close it on exit. Arguments and errors are those of `open_session`."""
    opened = await open_session(task, settings=settings, group=group)
    try:
        yield opened
    finally:
        await opened.close()


def task_of_row(row: Mapping[str, Any]) -> str:
    """Return the task id of a row, also of one by `trainer data prompts`. Raises: ValueError: it has none."""
    metadata = row.get("metadata")
    task = row.get(TASK_COLUMN) or (metadata.get(TASK_COLUMN) if isinstance(metadata, Mapping) else None)
    if not isinstance(task, str) or not task:
        raise ValueError(f"row: no column {TASK_COLUMN}; it has {', '.join(map(str, row)) or 'no columns'}")
    return task
