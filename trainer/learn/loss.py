"""slime's advantages and policy loss on rows of our own batches.

The arithmetic is `slime.utils.ppo_utils`; here are only its weights, those of slime's reducer: with
`--calculate-per-token-loss` all trained tokens of a step count equally; without it each rollout counts once, and so a
token of a long rollout for less.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One row of slime's train data that has an advantage."""

    tokens: Sequence[int]
    response_length: int
    loss_mask: Sequence[int]
    log_probs: Sequence[float]
    """Log-probabilities of the response under the policy that sampled it."""
    advantages: Sequence[float]
    """One per token of the response."""
    rollout_mask_sum: int
    """Trained tokens in all rows of the rollout."""
    image: int
    """Index of its patches."""


def trained_rows(data: Mapping[str, Sequence[Any]]) -> list[int]:
    """Return the positions of rows with an advantage and a trained token; the others have no gradient."""
    return [
        index
        for index, (reward, mask) in enumerate(zip(data["rewards"], data["loss_masks"], strict=True))
        if any(mask) and (reward.any() if hasattr(reward, "any") else reward)
    ]


def rows_of(data: Mapping[str, Sequence[Any]], *, images: Sequence[int]) -> list[TrainRow]:
    """Return slime's train data as rows, with the index of each one's image."""
    return [
        TrainRow(
            tokens=data["tokens"][index],
            response_length=data["response_lengths"][index],
            loss_mask=data["loss_masks"][index],
            log_probs=data["rollout_log_probs"][index],
            advantages=_by_token(data["rewards"][index], data["response_lengths"][index]),
            rollout_mask_sum=data["rollout_mask_sums"][index],
            image=image,
        )
        for index, image in enumerate(images)
    ]


def _by_token(reward: Any, count: int) -> list[float]:
    """Return what `trainer.slime.hooks.normalize_rewards` made of a row's reward, by token of its response."""
    return reward.tolist() if isinstance(reward, torch.Tensor) else [float(reward)] * count


def trained_tokens(rows: Iterable[TrainRow]) -> int:
    """Return the number of tokens of some rows that the loss counts."""
    return sum(sum(row.loss_mask) for row in rows)


def token_weights(rows: Sequence[TrainRow], *, per_token: bool, count: int, device: torch.device) -> torch.Tensor:
    """Return the weight in the loss of each response token of some rows of a step; 0 for tokens that are not trained.

    The weights of all rows of a step add up to 1.

    Args:
        per_token: Whether all trained tokens count equally; otherwise all rollouts do.
        count: Trained tokens of all rows of the step, or their rollouts.
        device: Where the tensor is.
    """
    masks = [torch.tensor(row.loss_mask, device=device, dtype=torch.float32) for row in rows]
    if not per_token:
        masks = [mask / row.rollout_mask_sum for mask, row in zip(masks, rows, strict=True)]
    return torch.cat(masks) / count


def policy_loss(
    rows: Sequence[TrainRow],
    log_probs: Sequence[torch.Tensor],
    weights: torch.Tensor,
    *,
    estimator: str,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of some rows of a step, and sums for metrics.

    Args:
        log_probs: The current policy's log-probabilities of each row's response tokens.
        weights: `token_weights` of the rows.
        estimator: `grpo` or `gspo`.
        eps_clip: Lower clip of the ratio.
        eps_clip_high: Upper clip of the ratio.
    """
    from slime.utils import ppo_utils  # noqa: PLC0415 -- from the user's checkout

    device = log_probs[0].device
    old = [torch.tensor(row.log_probs, device=device, dtype=torch.float32) for row in rows]
    advantages = torch.cat([torch.tensor(row.advantages, device=device, dtype=torch.float32) for row in rows])
    if estimator == "gspo":
        masks = [torch.tensor(row.loss_mask, device=device, dtype=torch.float32) for row in rows]
        kl = ppo_utils.compute_gspo_kl(list(log_probs), old, list(log_probs), masks)
    else:
        kl = torch.cat(old) - torch.cat(list(log_probs))
    losses, clipped = ppo_utils.compute_policy_loss(kl, advantages, eps_clip, eps_clip_high)
    sums = {
        "clip_frac": (clipped * weights).sum().detach(),
        "kl": (kl * weights).sum().detach(),
        "mismatch": ((torch.cat(old) - torch.cat(list(log_probs))).abs() * weights).sum().detach(),
    }
    return (losses * weights).sum(), sums
