"""When members of a group branch from each other: the policy of `group: tree`. Pure."""

from collections.abc import Mapping
from functools import partial
from statistics import fmean
from typing import Final, Protocol

from trainer.agent.types import Reply
from trainer.config import ExtensionError, InputError, called, named, require_call

STANDARD: Final = "standard"
_REPLY = Reply(text="a reply", token_ids=(1, 2), log_probs=(-0.1, -2.0))


class BranchPolicy(Protocol):
    """Decides before each reply of a member whether others branch off. Any such function."""

    def __call__(self, *, turns_since: int, reply: Reply) -> bool:
        """Return whether others branch off before a reply is performed.

        Args:
            turns_since: Turns since the member's last branch point, or its start.
            reply: The reply, with its log-probabilities.
        """


def standard_policy(*, every: int, above: float | None) -> BranchPolicy:
    """Branch after some turns, and before a reply that surprised the policy that sampled it by more than `above`."""
    return partial(_standard, every, above)


def _standard(every: int, above: float | None, *, turns_since: int, reply: Reply) -> bool:
    surprise = -fmean(reply.log_probs or (0.0,))
    return turns_since >= every or (above is not None and surprise > above)


def own_policy(name: str) -> BranchPolicy:
    """Return an own policy, named as `module:FUNCTION`; its results are checked.

    Raises:
        InputError: It is not a `BranchPolicy`.
    """
    known: Mapping[str, BranchPolicy] = {}
    function = named("branch", name, known)
    if isinstance(function, type):
        raise InputError(f"branch {name}: is a class; name a function, or an object that can be called")
    require_call("branch", name, function, turns_since=1, reply=_REPLY)
    own = partial(_checked, name, function)
    own(turns_since=1, reply=_REPLY)
    return own


def _checked(name: str, function: BranchPolicy, *, turns_since: int, reply: Reply) -> bool:
    """Ask own code. Raises: ExtensionError: It raised, or returned no bool."""
    found = called("branch", name, function, turns_since=turns_since, reply=reply)
    if not isinstance(found, bool):
        raise ExtensionError(f"branch {name}: it returned a {type(found).__name__}; return True or False")
    return found
