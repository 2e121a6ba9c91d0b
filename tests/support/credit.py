"""Sibling credit by a direct reading of its definition, on random trees."""

import random
import statistics
from dataclasses import dataclass, field

from trainer.rewards.credit import CreditedMember


def member(name: str, reward: float | None, *, turns: int = 4, parent: str = "", shared: int = 0) -> CreditedMember:
    return CreditedMember(name=name, parent=parent, shared_count=shared, turn_count=turns, reward=reward)


@dataclass
class Segment:
    """A segment of an explicit tree: its turns, and the segments that start where it ends."""

    owner: str
    turns: int
    following: list["Segment"] = field(default_factory=list)
    reward: float | None = None

    @property
    def value(self) -> float | None:
        if not self.following:
            return self.reward
        known = [each.value for each in self.following if each.value is not None]
        return statistics.fmean(known) if known else None


def random_tree(rng: random.Random, limit: int) -> tuple[list[Segment], list[CreditedMember]]:
    """Return a tree of segments, and the same tree as members."""
    members: list[CreditedMember] = []

    def grow(owner: str, parent: str, shared: int, done: int, depth: int) -> Segment:
        turns = rng.randint(1, 3)
        segment = Segment(owner, turns)
        end = done + turns
        if depth and len(names) < limit and rng.random() < 0.7:
            segment.following.append(grow(owner, parent, shared, end, depth - 1))
            for _ in range(rng.randint(1, 2)):
                names.append(f"m{len(names)}")
                segment.following.append(grow(names[-1], owner, end, end, depth - 1))
        else:
            segment.reward = None if rng.random() < 0.15 else rng.choice([0.0, 0.5, 1.0, -0.1])
            members.append(member(owner, segment.reward, turns=end, parent=parent, shared=shared))
        return segment

    names = ["m0"]
    roots = [grow("m0", "", 0, 0, 4)]
    for _ in range(rng.randint(0, 2)):
        names.append(f"m{len(names)}")
        roots.append(grow(names[-1], "", 0, 0, 4))
    return roots, members


def by_definition(roots: list[Segment]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}

    def visit(siblings: list[Segment]) -> None:
        for one in siblings:
            others = [each.value for each in siblings if each is not one and each.value is not None]
            value = one.value
            advantage = value - statistics.fmean(others) if value is not None and others else 0.0
            found.setdefault(one.owner, []).extend([advantage] * one.turns)
        for one in siblings:
            visit(one.following)

    visit(roots)
    return {name: tuple(values) for name, values in found.items()}
