"""Whether a person controls an episode, and what people did in it. Pure: no clock, no I/O.

A person who controls an episode holds a lease on that, which the page renews. Meanwhile the agent's steps and
evaluations are refused, not queued: they were decided on a screen that is no longer shown. After the person has acted,
they are also refused until the agent has observed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cuaenv.actions import (
    MAX_TEXT_BYTES,
    MAX_WHEEL_CLICKS,
    Action,
    Click,
    Drag,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TypeText,
)
from envd.base.errors import HumanInControl

#: The page renews a third of its lease earlier.
CONTROL_TTL_S = 30.0
#: When a refused caller may try again.
_RETRY_AFTER_S = 1.0


@dataclass(eq=False, slots=True)
class HumanControl:
    """The control of people over one episode."""

    control_id: str = ""
    """Identifies the holder's lease; empty while no person controls the episode."""
    holder: str = ""
    """Name of the holder's token; empty without tokens."""
    expire_s: float = 0.0
    """Monotonic time."""
    was_observed: bool = True
    """Whether the agent has observed since a person last acted."""

    def require_agent(self, episode_id: str) -> None:
        """Check that the agent may act. Raises: HumanInControl."""
        if self.control_id:
            why = f"{self.holder or 'a person'} controls it"
        elif not self.was_observed:
            why = "a person has acted since the last observation"
        else:
            return
        raise HumanInControl(
            f"episode {episode_id}: {why}; observe until it is handed back", retry_after_s=_RETRY_AFTER_S
        )

    def require_holder(self, episode_id: str, control_id: str) -> None:
        """Check that a person controls the episode. Raises: HumanInControl: not this one, or no longer."""
        if not control_id or self.control_id != control_id:
            raise HumanInControl(
                f"episode {episode_id}: you do not control it; take control first", retry_after_s=_RETRY_AFTER_S
            )

    def require(self, episode_id: str, control_id: str) -> None:
        """Check that a caller may act: a person, or with an empty id the agent. Raises: HumanInControl."""
        if control_id:
            self.require_holder(episode_id, control_id)
        else:
            self.require_agent(episode_id)

    def acted(self) -> None:
        """Note that a person acted."""
        self.was_observed = False

    def observed(self) -> None:
        """Note that the agent has observed, which counts once no person controls the episode."""
        self.was_observed = self.was_observed or not self.control_id


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
