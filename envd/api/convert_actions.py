"""Validate the actions of a request and scale their positions to guest pixels. Pure.

A field that breaks the schema raises `InvalidRequest` with the field's name. What only the guest can judge (a position
outside of the screen, an unknown key name) passes through; the guest reports it as the agent's mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cuaenv.action_codec import TOOL_KINDS, BadAction, from_proto
from cuaenv.actions import MAX_ACTION_COUNT, MAX_TOOL_COUNT, Action
from cuaenv.v1 import env_pb2
from envd.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Converts positions in a reference image to pixels of the guest's screen. Sizes are (width, height)."""

    reference_px: tuple[int, int]
    screen_px: tuple[int, int]

    def apply(self, x: int, y: int) -> tuple[int, int]:
        """Return the guest pixel under the centre of the reference pixel.

        A position inside the reference maps to one inside the screen, one outside to one outside.
        """
        return (
            _scaled(x, self.reference_px[0], self.screen_px[0]),
            _scaled(y, self.reference_px[1], self.screen_px[1]),
        )


def _scaled(position: int, reference_px: int, screen_px: int) -> int:
    # floor((position + 0.5) * screen / reference), in integers so that rounding cannot leave the screen.
    return (2 * position + 1) * screen_px // (2 * reference_px)


def actions_from_proto(
    messages: Sequence[env_pb2.Action], *, scale: Scale | None, field: str = "actions"
) -> tuple[Action, ...]:
    """Return the actions of a request; without a scale, positions are guest pixels already.

    Raises:
        InvalidRequest: A field is missing or out of range. The error names it, as in `actions[2].click.count`.
    """
    if not 1 <= len(messages) <= MAX_ACTION_COUNT:
        raise InvalidRequest(field, f"has {len(messages)} items; give 1 to {MAX_ACTION_COUNT}")
    tool_count = sum(message.WhichOneof("kind") in TOOL_KINDS for message in messages)
    if tool_count > MAX_TOOL_COUNT:
        raise InvalidRequest(field, f"has {tool_count} actions of tools; give at most {MAX_TOOL_COUNT}")
    actions: list[Action] = []
    for index, message in enumerate(messages):
        try:
            actions.append(from_proto(message, place=None if scale is None else scale.apply))
        except BadAction as error:
            raise InvalidRequest(".".join(filter(None, (f"{field}[{index}]", error.field))), error.problem) from error
    return tuple(actions)
