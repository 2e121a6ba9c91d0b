"""Sibling credit in slime: advantages by token, for `envd.credit: siblings`.

`trainer.slime.group.normalize_rewards` puts a tensor of the advantages of a row's response tokens where slime expects
its reward. slime hands it to the learner unchanged, and `advantages` (`--custom-advantage-function-path`) takes it out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.rewards.credit import Credit, Member, sibling_credit


def members_of(facts: Sequence[Mapping[str, Any]], rewards: Sequence[float | None]) -> list[Member]:
    """Return the members of a group from the facts of its rollouts; a void one counts as one without turns."""
    return [
        Member(
            name=found.get("episode_id") or f"void {number}",
            parent=found.get("parent_episode_id", ""),
            shared_count=found.get("shared_turns", 0),
            turn_count=found.get("turns", 0),
            reward=reward,
        )
        for number, (found, reward) in enumerate(zip(facts, rewards, strict=True))
    ]


def group_credit(
    facts: Sequence[Mapping[str, Any]], rewards: Sequence[float | None], *, by_deviation: bool = True
) -> list[Credit]:
    """Return the credit of each rollout of a group; see `trainer.rewards.credit.sibling_credit`."""
    return sibling_credit(members_of(facts, rewards), by_deviation=by_deviation)


def token_advantages(credit: Credit, *, first_turn: int, loss_mask: Sequence[int]) -> list[float]:
    """Return the advantage of each response token of a row: that of its turn, 0 for tokens that are not trained.

    Args:
        credit: The rollout's credit.
        first_turn: Turn of the row's first reply. Each run of ones in the mask is a reply: an observation follows it.
        loss_mask: The row's mask.

    Raises:
        IndexError: The mask has more replies than the rollout has turns.
    """
    found: list[float] = []
    turn, before = first_turn - 1, 0
    for trained in loss_mask:
        turn += trained and not before
        found.append(credit.of_turn(turn) if trained else 0.0)
        before = trained
    return found


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:  # noqa: ARG001 -- slime names it
    """Set the advantages and returns of the learner's rows, for `--custom-advantage-function-path`.

    Raises:
        ValueError: The rewards are not from `trainer.slime.group.normalize_rewards` with `envd.credit: siblings`.
    """
    rewards, lengths = rollout_data["rewards"], rollout_data["response_lengths"]
    if any(getattr(reward, "shape", None) != (length,) for reward, length in zip(rewards, lengths, strict=True)):
        raise ValueError(
            "--custom-advantage-function-path trainer.slime.credit.advantages: a row has no advantages by token; set"
            " --custom-reward-post-process-path trainer.slime.group.normalize_rewards and envd.credit: siblings"
        )
    device = rollout_data["kl"][0].device
    rollout_data["advantages"] = [reward.to(device) for reward in rewards]
    rollout_data["returns"] = rollout_data["advantages"]
