"""Read what models say as typed actions, and say actions as they would: a grammar for each way of speaking."""

from collections.abc import Callable, Mapping, Sequence

from trainer.agent.grammars.fallbacks import FALLBACKS, Fallbacks
from trainer.agent.grammars.grammar import CannotSay, Grammar, Intent, Parsed, Seen
from trainer.agent.grammars.qwen3_vl import Qwen3Vl

_GRAMMARS: Mapping[str, Callable[[Fallbacks], Grammar]] = {"qwen3-vl": Qwen3Vl}

#: By name, the default first.
GRAMMARS = tuple(_GRAMMARS)


def grammar(name: str, *, fallbacks: Sequence[str] = ()) -> Grammar:
    """Return a grammar by its name.

    Args:
        name: One of `GRAMMARS`.
        fallbacks: Lenient rules that are on, of `FALLBACKS`.

    Raises:
        ValueError: There is no such grammar or rule.
    """
    if name not in _GRAMMARS:
        raise ValueError(f"there is no grammar {name!r}; there are {', '.join(GRAMMARS)}")
    return _GRAMMARS[name](Fallbacks(tuple(fallbacks)))


__all__ = ["FALLBACKS", "GRAMMARS", "CannotSay", "Grammar", "Intent", "Parsed", "Seen", "grammar"]
