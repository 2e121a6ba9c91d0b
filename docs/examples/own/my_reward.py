"""reward: {recipe: "my_reward:Brisk", per_turn: 0.02}, or reward: "my_reward:halves"."""

from dataclasses import dataclass

from trainer.rewards.facts import Breakdown, EpisodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Brisk:
    """The checker's score, less a price for each turn. Its fields are its options."""

    per_turn: float = 0.01

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        parts = {"task": facts.task_score, "turns": -self.per_turn * len(facts.turns)}
        return Breakdown(recipe="brisk", total=sum(parts.values()), task_score=facts.task_score, parts=parts)


def halves(facts: EpisodeFacts) -> float:
    """Return a number where one part is enough: success, half of it, or nothing."""
    return round(2 * facts.task_score) / 2
