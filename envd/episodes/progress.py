"""An episode as values: what never changes about it, what it has done, which a rollback takes back, and its status.

Always true: an episode's `Progress` is replaced whole. So a rollback, a fork, a reset to a checkpoint and a restart of
the daemon restore the same facts: all of them. `EpisodeSpec` and `Progress` are stored as JSON, in the database and
with checkpoints.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field, PlainSerializer, PlainValidator

from cuaenv.action_codec import from_json, to_json
from cuaenv.actions import (
    MAX_TEXT_BYTES,
    MAX_WHEEL_CLICKS,
    Action,
    Click,
    Done,
    Drag,
    Fail,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TypeText,
)
from cuaenv.results import State
from envd.base.config import SettlePolicy
from envd.base.losses import ENDS_MACHINE
from envd.tasks.text import ScoreResult
from envd.tasks.user import Exchange

#: Actions of people that an observation reports; older ones are in the recording.
_MAX_PEOPLE_ACTIONS: Final = 200


def _in_utc(moment: datetime) -> datetime:
    if not 2000 <= moment.year < 9000:  # beyond, converting it or adding to it may overflow
        raise ValueError(f"{moment.isoformat()} is not a time of this millennium")
    return moment.astimezone(UTC)


# A stored value may come from another host, and lists of all callers contain it: each must fit a response.
ShortText = Annotated[str, Field(max_length=256)]
Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
StepCount = Annotated[int, Field(ge=0, le=100_000)]
_Action = Annotated[Action, PlainSerializer(to_json), PlainValidator(from_json)]
_LastAction = Annotated[Done | Fail, PlainSerializer(to_json), PlainValidator(from_json)]
_STORED: Final = ConfigDict(extra="forbid")


EpisodeState = State


class CheckpointTrigger(Enum):
    """Occasion at which an episode stores a checkpoint by itself."""

    #: A number of steps.
    STEPS = "steps"
    #: A fork, of the state that the copies begin in.
    BRANCH_POINT = "branch_point"
    #: The step in which the agent sent done or fail.
    DONE = "done"
    #: An evaluation that gave 0.
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticCheckpoints:
    """When an episode stores checkpoints by itself."""

    every_steps: int = 0
    """After every so many steps; 0 for never."""
    on: frozenset[CheckpointTrigger] = frozenset()
    """Further occasions."""

    def after_step(self, step_count: int, *, is_done: bool) -> CheckpointTrigger | None:
        """Return the occasion that a step is, if it is one."""
        if is_done and CheckpointTrigger.DONE in self.on:
            return CheckpointTrigger.DONE
        if not is_done and self.every_steps and step_count % self.every_steps == 0:
            return CheckpointTrigger.STEPS
        return None


NO_CHECKPOINTS: Final = AutomaticCheckpoints()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOrigin:
    """Source of an episode's first state. Equal origins prove that episodes began in the same state."""

    template_digest: ShortText
    """Identifies the frozen machine that its machine was forked from: memory, devices, disk and settings."""
    overlay_parent: ShortText
    """Identifies the disk on which its machine's overlay is based."""
    first_frame_id: ShortText
    checkpoint_id: ShortText = ""
    """The checkpoint in whose state it began; empty if none."""
    checkpoint_episode_id: ShortText = ""
    checkpoint_time: Moment | None = None
    """When that checkpoint was made."""
    is_new_session: bool = False
    """Whether its machine is a new session on the template's files, in which the task's setup ran, instead of a copy:
    equal to the others of its group by construction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What never changes about an episode."""

    __pydantic_config__: ClassVar[ConfigDict] = _STORED

    episode_id: ShortText
    group_id: ShortText
    parent_episode_id: ShortText = ""
    """The episode from which it was forked; empty if none."""
    task_id: ShortText
    task_digest: ShortText
    """Digest of the task's definition: of another version, a stored state is not a state."""
    pool: ShortText
    run: ShortText
    owner: ShortText
    """Name of the token that opened it or its first ancestor; empty if the daemon uses no tokens."""
    max_steps: StepCount
    settle: SettlePolicy
    automatic: AutomaticCheckpoints = NO_CHECKPOINTS
    origin: EpisodeOrigin
    create_time: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What an episode has done, and the world that it is in: everything that a rollback takes back."""

    __pydantic_config__: ClassVar[ConfigDict] = _STORED

    step_count: StepCount = 0
    """Number of steps performed, which is the index of the next step."""
    asked: Annotated[tuple[Exchange, ...], Field(max_length=100)] = ()
    """What the agent has asked the task's user."""
    people_actions: Annotated[tuple[_Action, ...], Field(max_length=_MAX_PEOPLE_ACTIONS)] = ()
    """What people did since the agent's last step, oldest first, as an agent would do it."""
    perturbations: Annotated[tuple[ShortText, ...], Field(max_length=64)] = ()
    """Kinds of the perturbations of its world."""
    last_checkpoint_id: ShortText = ""
    """The checkpoint that its present state descends from; empty if none."""
    state: EpisodeState = EpisodeState.ACTIVE
    end_reason: str = ""
    """Why it is no longer active, UPPER_SNAKE: AGENT_DONE, AGENT_FAIL, GUEST_ENDED, MAX_STEPS or EVALUATED; if it
    FAILED, the reason of the error: MACHINE_LOST, LOSS_UNDECIDED, GUEST_UNRESPONSIVE, GUEST_ERROR or BUG. Empty while
    it is active."""
    cause: str = ""
    """Why it FAILED, as a sentence; if its guest ended, the UPPER_SNAKE cause; otherwise empty."""
    last_action: _LastAction | None = None
    """The action with which the agent ended the episode."""
    score: ScoreResult | None = None
    """The result of the checkers, which run once."""
    evaluator_error: str = ""
    """Why the checkers gave no score; empty if they gave one or have not run."""

    @property
    def guest_end_cause(self) -> str:
        """Cause if the guest ended itself, such as POWER_OFF; otherwise empty."""
        return "" if self.state is EpisodeState.FAILED else self.cause

    @property
    def has_score(self) -> bool:
        """Whether no failure can void it: it was scored, or its guest ended its machine, which scores 0."""
        return self.score is not None or self.guest_end_cause in ENDS_MACHINE

    def after_step(self, last_action: Done | Fail | None) -> "Progress":
        """Return the progress after another step."""
        return replace(
            self, step_count=self.step_count + 1, people_actions=(), last_action=last_action or self.last_action
        )

    def with_people_actions(self, actions: Iterable[Action]) -> "Progress":
        """Return the progress after a person acted."""
        people_actions = tuple(merged([*self.people_actions, *actions])[-_MAX_PEOPLE_ACTIONS:])
        return replace(self, people_actions=people_actions)

    def reopened(self) -> "Progress":
        """Return the progress of an episode that continues from here, also if this one had ended."""
        return replace(
            self, state=EpisodeState.ACTIVE, end_reason="", cause="", last_action=None, score=None, evaluator_error=""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStatus:
    """An episode at one time."""

    spec: EpisodeSpec
    progress: Progress
    epoch: int
    """Increases with each rollback."""
    expire_time: datetime
    is_parked: bool = False
    """Whether it has no machine now."""
    tools: tuple[str, ...] = ()
    """Tools that the agent can use: `shell`, `files`, `ask_user`, and `mcp:NAME` for each MCP server."""

    @property
    def episode_id(self) -> str:
        return self.spec.episode_id


def merged(actions: Iterable[Action]) -> list[Action]:
    """Return input as it arrives from a page as the actions that an agent would use.

    Text is joined, a press, moves and a release are a drag, repeated clicks at one place are one, moves end at the
    last, and turns of the wheel add up; none becomes longer than an action of the contract may be.
    """
    found: list[Action] = []
    for action in actions:
        last = found[-1] if found else None
        match last, action:
            case TypeText(), TypeText() if len((last.text + action.text).encode()) <= MAX_TEXT_BYTES:
                found[-1] = TypeText(last.text + action.text)
            case Move(), Move() | Click() | MouseDown() | Scroll() if _place(action) is not None:
                found[-1] = action
            case Click(), Click() if _place(last) == _place(action) and last.count + action.count <= 3:
                found[-1] = replace(action, count=last.count + action.count)
            case Scroll(), Scroll() if _place(last) == _place(action) and _fits(
                last.dx + action.dx, last.dy + action.dy
            ):
                found[-1] = replace(action, dx=last.dx + action.dx, dy=last.dy + action.dy)
            case _, MouseUp() if (drag := _drag(found, action)) is not None:
                while not isinstance(found.pop(), MouseDown):
                    pass
                found.append(drag)
            case _:
                found.append(action)
    return found


def _drag(actions: list[Action], up: MouseUp) -> Drag | None:
    """Return the drag that a release ends; None if no press and moves of the same button precede it."""
    at = len(actions) - 1
    while at >= 0 and isinstance(actions[at], Move):
        at -= 1
    down = actions[at] if at >= 0 else None
    if not isinstance(down, MouseDown) or down.button != up.button:
        return None
    start, end = _place(down), _place(up) or (_place(actions[-1]) if at < len(actions) - 1 else None)
    if start is None or end is None:
        return None
    return Drag(start_x=start[0], start_y=start[1], end_x=end[0], end_y=end[1], button=up.button)


def _fits(dx: int, dy: int) -> bool:
    return max(abs(dx), abs(dy)) <= MAX_WHEEL_CLICKS


def _place(action: Action) -> tuple[int, int] | None:
    x, y = getattr(action, "x", None), getattr(action, "y", None)
    return None if x is None or y is None else (x, y)
