"""A model that solves a task of the drawn desktops in three turns, and settings of its agent."""

from collections.abc import Callable

from cuaenv.client import Action, Click, Done
from trainer.agent.grammars import grammar

TASK = "fake/count-to-five"
SAY = grammar("qwen3-vl").render
PLAN: list[list[Action]] = [[Click(640, 125, count=3)], [Click(640, 125, count=2)], [Done()]]
AGENT = {"max_turns": 4, "prompt_tokens": 8192, "reply_tokens": 400, "image_max_pixels": 65_536, "timeout_s": 60.0}
PARAMS = {"temperature": 1.0, "max_new_tokens": 400}


def turn_in(prompt: str) -> int:
    """Return the number of the turn that a prompt asks for, from 1."""
    return prompt.count("<|im_start|>assistant\n")


def counting(prompt: str) -> str:
    """Solve the task."""
    return SAY(PLAN[turn_in(prompt) - 1])


def counting_apart() -> Callable[[str], str]:
    """Return a model of a group of two that branches after the first turn: one member solves the task, one ends it."""
    asked = 0

    def say(prompt: str) -> str:
        nonlocal asked
        asked += turn_in(prompt) == 2
        return SAY([Done()]) if turn_in(prompt) == 2 and asked == 2 else counting(prompt)

    return say
