"""Rewards by name. `recipe("shaped", share=0.3)` returns a pure function from facts to a `Breakdown`.

Each recipe is a frozen dataclass whose fields are its options, so recipes can be compared, printed and pickled. Own
ones are named as `module:NAME`: such a class, any class whose arguments are its options, or a function of the facts.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from cuaenv.problems import did_you_mean
from trainer.config import STRICT, ExtensionError, InputError, called, is_own, named, parse, require_call
from trainer.rewards.facts import ActionFacts, Breakdown, EpisodeFacts, TurnFacts
from trainer.rewards.shaped import Shaped

Recipe = Callable[[EpisodeFacts], Breakdown]
"""Returns the reward of an episode and its parts. Pure: equal facts give an equal breakdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The checker's score."""

    __pydantic_config__: ClassVar = STRICT

    strict: bool = False
    """Give 0 unless every reply followed the grammar and the last one ended the episode, or its guest.

    By the score alone an agent that talks on after it has solved the task gets as much as one that ends, and learns to
    (docs/learning.md).
    """

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        parts = {"task": facts.task_score}
        if self.strict and not _ended_in_form(facts):
            parts["form"] = -facts.task_score
        total = math.fsum(parts.values())
        return Breakdown(recipe="task", total=total, task_score=facts.task_score, parts=parts)


def _ended_in_form(facts: EpisodeFacts) -> bool:
    turns = facts.turns
    if not turns or not all(turn.parsed for turn in turns):
        return False
    return turns[-1].done or turns[-1].failed or bool(facts.guest_end_cause)


_RECIPES: Mapping[str, type[TaskScore] | type[Shaped]] = {"task": TaskScore, "shaped": Shaped}

NAMES = tuple(_RECIPES)
"""The built-in recipes; start with "task"."""

#: Recipes that were built in until 0.2.0, by prefix.
_MOVED = {"slime_osworld": "slime_osworld:SlimeOSWorld", "modal_v": "modal_windows:Modal"}

_TURN = TurnFacts(
    text="a reply", parsed=True, actions=(ActionFacts(kind="left_click", point_px=(1, 1)),), changed_fraction=0.1
)
#: Episodes that an own reward must be able to score before it scores a real one.
_TRIALS = (
    EpisodeFacts(task_id="trial/solved", task_score=1.0, turns=(_TURN,), max_turns=4),
    EpisodeFacts(task_id="trial/failed", task_score=0.0, turns=(_TURN,) * 4, max_turns=4, truncated=True),
    EpisodeFacts(task_id="trial/unparsed", task_score=0.0, turns=(TurnFacts(text="?", parsed=False),), max_turns=4),
    EpisodeFacts(task_id="trial/empty", task_score=0.0, turns=(), max_turns=4, truncated=True),
)


def recipe_of(reward: str | Mapping[str, Any]) -> Recipe:
    """Return the recipe of a setting: a name, or `recipe:` with its options. Raises: InputError, as `recipe`."""
    if isinstance(reward, str):
        return recipe(reward)
    return recipe(str(reward.get("recipe", "task")), **{key: reward[key] for key in reward if key != "recipe"})


def recipe(name: str = "task", **options: object) -> Recipe:
    """Return the recipe of that name.

    Args:
        name: One of `NAMES`, or `module:NAME` of an own one: a class that takes the options, or a function. Both are
            called with an `EpisodeFacts`, and return a `Breakdown`, or a number for one part.
        options: Fields of its class, such as those of `trainer.rewards.shaped.Shaped`.

    Raises:
        InputError: The recipe or an option is unknown, a value is out of range, or an own recipe cannot score made-up
            episodes: it raises, or returns neither a `Breakdown` nor a finite number.
    """
    for prefix, example in _MOVED.items():
        if name.startswith(prefix) and not is_own(name):
            raise InputError(
                f"reward {name!r} is no longer built in; copy docs/examples/own/{example.partition(':')[0]}.py of the"
                f" repository to where Python finds it, and name it as {example}"
            )
    kind = named("reward", name, _RECIPES)
    if not is_own(name):
        made: Recipe = parse(kind, options, path=name)
        return made
    own = partial(_checked, name, _own(name, kind, options))
    for facts in _TRIALS:
        own(facts)
    return own


def _checked(name: str, function: Callable[[EpisodeFacts], Any], facts: EpisodeFacts) -> Breakdown:
    """Return the reward of own code and its parts. Raises: ExtensionError: It raised, or returned something else."""
    made = called("reward", name, function, facts)
    total = made.total if isinstance(made, Breakdown) else made
    if isinstance(total, bool) or not isinstance(total, Real) or not math.isfinite(total):
        shown = repr(total) if isinstance(total, Real) or total is None else f"a {type(total).__name__}"
        raise ExtensionError(
            f"reward {name}: it returned {shown} for {facts.task_id}; return a finite number, or a Breakdown with one"
        )
    if not isinstance(made, Breakdown):
        parts = {name.partition(":")[2]: float(total)}
        return Breakdown(recipe=name, total=float(total), task_score=facts.task_score, parts=parts)
    if made.task_score != facts.task_score:
        raise ExtensionError(
            f"reward {name}: its task_score is {made.task_score}, but that of {facts.task_id} is {facts.task_score};"
            " return that of the facts"
        )
    return made


def _own(name: str, kind: Any, options: Mapping[str, object]) -> Callable[[EpisodeFacts], Any]:
    if not inspect.isclass(kind):
        require_call("reward", name, kind, _TRIALS[0])
        if options:
            raise InputError(f"reward {name}: a function takes no options, but there is {', '.join(options)}")
        function: Callable[[EpisodeFacts], Any] = kind
        return function
    if dataclasses.is_dataclass(kind):
        known = [field.name for field in dataclasses.fields(kind) if field.init]
        for key in options:
            if key not in known:
                near = did_you_mean(key, known) or f"; known keys: {', '.join(known) or 'none'}"
                raise InputError(f"{name}.{key}: unknown key{near}")
        reward: Any = parse(kind, options, path=name)
    else:
        require_call("reward", name, kind, **options)
        reward = called("reward", name, kind, **options)
    if not callable(reward):
        raise InputError(f"reward {name}: it has no __call__(self, facts); see trainer.rewards.recipes.Recipe")
    require_call("reward", name, reward, _TRIALS[0])
    made: Callable[[EpisodeFacts], Any] = reward
    return made
