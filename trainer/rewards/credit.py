"""Credit from siblings: the advantage of each turn in a group whose members branch from each other. Pure.

Members that continue from one branch point start in one identical state, on forks of one machine. The turns of a
member between two branch points are a segment. Its value is the mean of the values of the segments that follow it, or
the member's return if none does; its advantage is that value minus the mean value of its siblings, the segments that
start in the same state:

    Q(segment) = return, or mean of Q over the segments that start at its end
    A(segment) = Q(segment) - mean of Q over its siblings

Each sibling is one independent sample of the policy from that state, so the mean over siblings estimates the value of
the state without bias, whenever the decision to branch does not depend on what follows. Leaving the segment itself out
keeps the policy gradient unbiased (as in RLOO, arXiv:2402.14740). With k siblings in all of variance v, the variance of
an advantage is v k / (k - 1), without the variance of what happened before the state. A segment without siblings has no
credit: 0. GRPO instead compares whole returns, which says nothing about where members differ.

A void member has no return and counts in no mean. The segments of members that branched from it still have siblings.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedMember:
    """A member of a group, in turns that count from 1."""

    name: str
    """Unique in the group, such as its episode's id."""
    parent: str = ""
    """The member that it branched from; empty if it began at the beginning of the task."""
    shared_count: int = 0
    """Turns that it shares with its parent."""
    turn_count: int
    """All its turns, shared ones included."""
    reward: float | None
    """Return; None if it is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of the turns that a member took itself."""

    first_turn: int
    """Number of the first of them."""
    advantages: tuple[float, ...]
    """One per turn."""
    sibling_count: int
    """Turns among them with siblings to compare with."""

    def of_turn(self, turn: int) -> float:
        """Return the advantage of a turn that the member took itself. Raises: IndexError."""
        if turn < self.first_turn:
            raise IndexError(f"turn {turn} is shared; the first own one is {self.first_turn}")
        return self.advantages[turn - self.first_turn]

    def of_tokens(self, loss_mask: Sequence[int], *, first_turn: int) -> list[float]:
        """Return the advantage of each response token of a row: that of its turn, 0 for tokens that are not trained.

        Args:
            loss_mask: The row's mask. Each run of ones in it is a reply: an observation follows it.
            first_turn: Turn of the row's first reply.

        Raises:
            IndexError: The mask has more replies than the member has turns.
        """
        found: list[float] = []
        turn, before = first_turn - 1, 0
        for trained in loss_mask:
            turn += trained and not before
            found.append(self.of_turn(turn) if trained else 0.0)
            before = trained
        return found


def sibling_credit(members: Sequence[CreditedMember], *, by_deviation: bool = True) -> list[Credit]:
    """Return the credit of each member.

    Args:
        members: The group. A parent that is missing counts as a void member.
        by_deviation: Divide by the sample deviation of the returns + 1e-6, as GRPO does.

    Raises:
        ValueError: A return is not finite, or a name occurs twice.
    """
    if len({member.name for member in members}) != len(members):
        raise ValueError("two members of the group have one name")
    returns = [member.reward for member in members if member.reward is not None]
    if not all(map(math.isfinite, returns)):
        raise ValueError(f"the group has a return that is not finite: {returns}")
    scale = statistics.stdev(returns) + 1e-6 if by_deviation and len(returns) > 1 else 1.0
    tree = _Tree(members)
    return [tree.credit(member, scale) for member in members]


class _Tree:
    def __init__(self, members: Sequence[CreditedMember]) -> None:
        self._rewards: Mapping[str, float | None] = {member.name: member.reward for member in members}
        self._children: dict[tuple[str, int], list[str]] = defaultdict(list)
        """Members that branched, by parent and its turns so far; those of the beginning by ("", 0)."""
        self._branch_turns: dict[str, list[int]] = defaultdict(list)
        for member in members:
            self._children[member.parent, member.shared_count].append(member.name)
        missing = {member.parent for member in members} - self._rewards.keys() - {""}
        self._children["", 0] += sorted(missing)
        for parent, turn in self._children:
            if parent:
                self._branch_turns[parent].append(turn)
        self._values: dict[tuple[str, int], float | None] = {}

    def credit(self, member: CreditedMember, scale: float) -> Credit:
        starts = [member.shared_count, *(t for t in sorted(self._branch_turns[member.name]) if t > member.shared_count)]
        advantages: list[float] = []
        sibling_count = 0
        for start, end in zip(starts, [*starts[1:], member.turn_count], strict=True):
            node = (member.parent, start) if start == member.shared_count else (member.name, start)
            value = self._value(member.name, start)
            others = [
                found
                for name in self._starting(*node)
                if name != member.name and (found := self._value(name, start)) is not None
            ]
            advantage, has_siblings = 0.0, value is not None and bool(others)
            if value is not None and others:
                advantage = (value - statistics.fmean(others)) / scale
            advantages += [advantage] * (end - start)
            sibling_count += (end - start) * has_siblings
        return Credit(first_turn=member.shared_count + 1, advantages=tuple(advantages), sibling_count=sibling_count)

    def _starting(self, parent: str, turn: int) -> list[str]:
        """Return the members with a segment that starts at a node; a parent's own one continues there."""
        return [*([parent] if parent else []), *self._children[parent, turn]]

    def _value(self, name: str, start: int) -> float | None:
        """Return the value of a member's segment that starts after `start` turns; None without any return below it."""
        if (name, start) not in self._values:
            ends = [turn for turn in self._branch_turns[name] if turn > start]
            if ends:
                end = min(ends)
                values = [self._value(each, end) for each in self._starting(name, end)]
                known = [value for value in values if value is not None]
                self._values[name, start] = statistics.fmean(known) if known else None
            else:
                self._values[name, start] = self._rewards.get(name)
        return self._values[name, start]
