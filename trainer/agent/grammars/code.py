"""Fenced blocks of literal pyautogui calls and sleeps, or a line DONE, FAIL or WAIT; points in pixels.

The last block that is marked `python` or unmarked counts if it is not empty, else the last line with a keyword.
"""

import re
from collections.abc import Sequence

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Done, Fail
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.grammar import Grammar, Intent, UnsupportedAction
from trainer.agent.grammars.pyautogui_calls import keyword, keyword_for, parse_calls, render_calls

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*$", re.MULTILINE)


class Code(Grammar):
    """A block of one or more calls."""

    name = "code"

    def instructions(self, picture: Picture) -> str:
        return (
            "Act by a block of Python at the end of your reply:\n"
            "```python\npyautogui.click(200, 150)\npyautogui.write('hello')\n```\n"
            "It is read, not run: only calls of pyautogui and of time.sleep with literal arguments are allowed, one a"
            " line. Instead of a block, a line that says only WAIT waits, DONE says that the task is done, and FAIL"
            f" that it cannot be done. Places are x, y in pixels of the screenshot, which is {picture.width} wide and"
            f" {picture.height} high."
        )

    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        return parse_fence(text, picture)

    def write(self, actions: Sequence[Action]) -> str:
        if len(actions) == 1 and (word := keyword_for(actions[0])) is not None:
            return word
        if any(isinstance(action, Done | Fail) for action in actions):
            raise UnsupportedAction("DONE and FAIL need a separate reply")
        lines = [line for action in actions for line in render_calls(action)]
        return "```python\n" + "\n".join(lines) + "\n```"


def parse_fence(text: str, picture: Picture) -> Sequence[Intent]:
    """Parse the last block, or the last line with a keyword. Raises: ParseError."""
    block = _last_block(text)
    if block.strip():
        ending = keyword(block)
        return [ending] if ending is not None else parse_calls(block, picture)
    for line in reversed(text.splitlines()):
        ending = keyword(line.strip(" \t`"))
        if ending is not None:
            return [ending]
    raise ParseError("the reply has no block of Python and no line that says DONE, FAIL or WAIT")


def _last_block(text: str) -> str:
    """Return the content of the last block of Python; its closing fence may be trimmed."""
    marks = list(_FENCE.finditer(text))
    content = ""
    while marks:
        opening = marks.pop(0)
        closing = next((mark for mark in marks if not mark[1]), None)
        if opening[1].lower() in ("", "python", "py"):
            content = text[opening.end() : closing.start() if closing else len(text)]
        if closing is None:
            break
        del marks[: marks.index(closing) + 1]
    return content
