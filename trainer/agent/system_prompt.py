"""The texts around an episode: the system message, and the task. Standard ones, or a user's own. Pure."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final

from trainer.config import InputError, called, is_own, named, require_call

SYSTEM = (
    "You carry out a task on a desktop computer, through its screen, mouse and keyboard. After each of your replies the"
    " computer does what you said, and you are shown {shown}. Look at it before you go on: an action may have had"
    " another effect than you meant, or none yet.\n\n"
    "Say briefly what you see and what you do next, then act. Declare the task done only when all of it is done; if it"
    " cannot be done on this computer, declare that instead of pretending. You have {max_turns} replies.\n\n"
    "{instructions}"
)
TASK = "Task: {instruction}"
STANDARD: Final = "standard"


class Prompt:
    """The texts at the start of each row: standard ones, which a class of the same methods replaces.

    Pure: equal arguments give equal texts.
    """

    def system(self, *, shown: str, max_turns: int, instructions: str) -> str:
        """Return the system message.

        Args:
            shown: What the model is shown after each reply, such as "a screenshot".
            max_turns: Replies of an episode.
            instructions: How to write actions: those of the grammar and of the tools.
        """
        return SYSTEM.format(shown=shown, max_turns=max_turns, instructions=instructions)

    def task(self, instruction: str) -> str:
        """Return the text next to the first observation, of a task's instruction."""
        return TASK.format(instruction=instruction)


_PROMPTS: Mapping[str, type[Prompt]] = {STANDARD: Prompt}


@functools.cache
def prompt_of(name: str) -> Prompt:
    """Return a prompt by its name.

    Args:
        name: `standard`, or `module:CLASS` of an own one, which takes no arguments.

    Raises:
        InputError: The name is unknown, or the own class lacks a method, raises, or returns no text.
    """
    kind = named("prompt", name, _PROMPTS)
    if not is_own(name):
        return kind()
    if not inspect.isclass(kind):
        raise InputError(f"prompt {name}: is a {type(kind).__name__}; name a class")
    require_call("prompt", name, kind)
    made: Any = called("prompt", name, kind)
    given = {"shown": "a screenshot", "max_turns": 15, "instructions": "How to act."}
    for method, positional, options in (("system", (), given), ("task", ("Open the editor.",), {})):
        function = getattr(made, method, None)
        if function is None:
            raise InputError(f"prompt {name}: it has no method {method}; see trainer.agent.system_prompt.Prompt")
        require_call("prompt", f"{name}.{method}", function, *positional, **options)
        text = called("prompt", f"{name}.{method}", function, *positional, **options)
        if not isinstance(text, str):
            raise InputError(f"prompt {name}.{method}: it returned a {type(text).__name__}; return a text")
    prompt: Prompt = made
    return prompt
