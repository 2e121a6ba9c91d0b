"""Answer and action tags with one literal pyautogui call, or WAIT, DONE or FAIL; points in pixels.

The tool call of `tool_call.py` and a fenced block are accepted too. The first kind found counts, in the order tool
call, answer, action, fence.
"""

from collections.abc import Sequence

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.code import parse_fence
from trainer.agent.grammars.grammar import Grammar, Intent, UnsupportedAction, only_action
from trainer.agent.grammars.pyautogui_calls import keyword, keyword_for, parse_calls, render_calls
from trainer.agent.grammars.tool_call import intent_of, parse_call
from trainer.agent.grammars.tool_calls import OPEN


class Tags(Grammar):
    """`<answer>pyautogui.click(340, 512)</answer>`, one a reply."""

    name = "tags"
    stop = ("</answer>", "</action>")

    parse_arguments = staticmethod(intent_of)

    def instructions(self, picture: Picture) -> str:
        return (
            "Act by one call at the end of your reply, such as <answer>pyautogui.click(200, 150)</answer>. The calls"
            " are pyautogui's click, doubleClick, tripleClick, rightClick, moveTo, dragTo, scroll, write, press and"
            " hotkey, with literal arguments. WAIT in place of a call waits, DONE says that the task is done, FAIL that"
            f" it cannot be done. Places are x, y in pixels of the screenshot, which is {picture.width} wide and"
            f" {picture.height} high."
        )

    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        if OPEN in text:
            return parse_call(text, picture)
        for tag in ("answer", "action"):
            begin, end = f"<{tag}>", f"</{tag}>"
            start = text.find(begin)
            if start < 0:
                continue
            # Up to the last closing tag, because a typed text may contain one; the engine may have trimmed it.
            stop = text.rfind(end, start)
            content = text[start + len(begin) : stop if stop >= 0 else len(text)]
            if stop >= 0 and text[stop + len(end) :].strip():
                raise ParseError(f"nothing may follow {end}")
            ending = keyword(content)
            if ending is not None:
                return [ending]
            return parse_calls(content, picture, max_calls=1)
        if "```" in text:
            return parse_fence(text, picture)
        raise ParseError("the reply has no <answer>")

    def write(self, actions: Sequence[Action]) -> str:
        action = only_action(actions, self.name)
        content = keyword_for(action)
        if content is None:
            calls = render_calls(action)
            if len(calls) != 1:
                raise UnsupportedAction(f"tags hold one call, but {action} needs {len(calls)}; split it first")
            content = calls[0]
        return f"<answer>{content}</answer>"
