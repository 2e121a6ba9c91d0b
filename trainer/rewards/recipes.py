"""Rewards by name. `recipe("shaped", share=0.3)` returns a pure function from facts to a `Breakdown`.

Each recipe is a frozen dataclass whose fields are its options, so recipes can be compared, printed and pickled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from trainer.config import STRICT, ConfigError, parse
from trainer.rewards.facts import Breakdown, EpisodeFacts
from trainer.rewards.history.modal import VERSIONS, Modal
from trainer.rewards.osworld import SlimeOSWorld
from trainer.rewards.shaped import Shaped


class Recipe(Protocol):
    """A reward. Pure: equal facts give an equal breakdown."""

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        """Return the reward and its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The checker's score."""

    __pydantic_config__: ClassVar = STRICT

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        parts = {"task": facts.task_score}
        return Breakdown(recipe="task", total=facts.task_score, task_score=facts.task_score, parts=parts)


#: Class of each recipe, and the fields that its name sets.
_RECIPES: Mapping[str, tuple[type, Mapping[str, str]]] = {
    "task": (Task, {}),
    "shaped": (Shaped, {}),
    "slime_osworld": (SlimeOSWorld, {}),
    **{f"modal_{version}": (Modal, {"version": version}) for version in VERSIONS},
}

NAMES = tuple(_RECIPES)
"""All recipes; start with "task"."""


def recipe(name: str = "task", **options: object) -> Recipe:
    """Return the recipe of that name.

    Args:
        name: One of `NAMES`.
        options: Fields of its class: `trainer.rewards.shaped.Shaped`, `.osworld.SlimeOSWorld`, `.history.modal.Modal`.

    Raises:
        ConfigError: The recipe or an option is unknown, or a value is out of range; the message lists the valid ones.
    """
    if name == "modal_v12c":
        raise ConfigError(
            "modal_v12c adds noise to the reward, and rewards here are deterministic; modal_v12b is the same without it"
        )
    if name not in _RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; choose one of {', '.join(NAMES)}")
    kind, fixed = _RECIPES[name]
    made: Recipe = parse(kind, {**options, **fixed}, path=name)
    return made
