"""agent: {grammar: "my_grammar:Lines"}."""

from collections.abc import Sequence

from cuaenv.client import Action, Click, Done
from trainer.agent.grammars import Grammar, Intent, ParseError, Picture, UnsupportedAction, intent


class Lines(Grammar):
    """One action per reply: `click X Y` or `done`."""

    name, coordinates = "lines", "normalised"

    def instructions(self, picture: Picture) -> str:
        return f"Write `click X Y`, with X below {picture.width} and Y below {picture.height}, or `done`."

    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        match text.split():
            case ["done"]:
                return [intent(Done(), "done", {})]
            case ["click", x, y] if x.isdecimal() and y.isdecimal():
                return [intent(Click(int(x), int(y)), "click", {"x": int(x), "y": int(y)})]
        raise ParseError("write `click X Y` or `done`")

    def write(self, actions: Sequence[Action]) -> str:
        if len(actions) == 1 and isinstance(actions[0], Done | Click):
            return "done" if isinstance(actions[0], Done) else f"click {actions[0].x} {actions[0].y}"
        raise UnsupportedAction("one click, or done")
