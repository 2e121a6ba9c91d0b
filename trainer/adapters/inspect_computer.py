"""Calls of inspect_ai's tool `computer()`, as actions of a desktop. Pure.

The tool runs a program in its sandbox, such as `... left_click --coordinate 3 4`, and reads a JSON object from it. Here
the program's arguments become actions, and nothing runs in the guest.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action
from trainer.agent.grammars.anthropic import computer_actions
from trainer.agent.grammars.computer_use import DIRECTIONS

#: How the tool starts its program.
PROGRAM = "/opt/inspect/tool/computer_tool.py"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ParseError(message)


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("action")
    parser.add_argument("--coordinate", type=int, nargs=2)
    parser.add_argument("--start_coordinate", type=int, nargs=2)
    parser.add_argument("--region", type=int, nargs=4)
    parser.add_argument("--text")
    parser.add_argument("--duration", type=float)
    parser.add_argument("--scroll_amount", type=int)
    parser.add_argument("--scroll_direction", choices=DIRECTIONS)
    return parser


_PARSER = _parser()


def read_call(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the tool's call. Raises: ParseError: it is malformed."""
    return _PARSER.parse_args(list(arguments))


def actions_of(call: argparse.Namespace) -> list[Action]:
    """Return the actions of a call; none for those that only observe.

    Raises:
        ParseError: The call is incomplete, or a desktop here cannot do it.
    """
    if call.action in ("screenshot", "cursor_position", "zoom"):
        return []
    return computer_actions(call.action, {name: value for name, value in vars(call).items() if value is not None})


def region_of(
    call: argparse.Namespace, *, picture: tuple[int, int], screen: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the region of a zoom as (x, y, width, height) in pixels of the screen.

    Args:
        call: Its region is (left, top, right, bottom) in pixels of the picture.
        picture: (width, height) of the picture that the model saw.
        screen: (width, height) of the screen.

    Raises:
        ParseError: There is no region, or it is empty or outside of the picture.
    """
    left, top, right, bottom = call.region or (0, 0, 0, 0)
    if not (0 <= left < right <= picture[0] and 0 <= top < bottom <= picture[1]):
        raise ParseError(
            f"region {call.region} is not a part of the picture; give [left, top, right, bottom] in pixels, at most"
            f" [0, 0, {picture[0]}, {picture[1]}]"
        )
    (x, to_x), (y, to_y) = (
        (start * screen_px // picture_px, -(-end * screen_px // picture_px))
        for start, end, picture_px, screen_px in (
            (left, right, picture[0], screen[0]),
            (top, bottom, picture[1], screen[1]),
        )
    )
    return x, y, to_x - x, to_y - y
