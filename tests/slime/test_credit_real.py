"""Sibling credit through slime's own columns and Sample."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]


def sample_of(index: int, reward: float, mask: list[int], **facts: Any) -> Any:
    from slime.utils.types import Sample

    from trainer.slime.play.samples import note

    sample = Sample(group_index=0, index=index, rollout_id=index, response_length=len(mask), tokens=[1, *mask])
    sample.loss_mask, sample.reward, sample.status = mask, reward, Sample.Status.COMPLETED
    note(sample, {"turns": 2, "shared_turns": 0, "parent_episode_id": "", "first_turn": 1, **facts})
    return sample


def test_slime_hands_advantages_by_token_to_the_learner() -> None:
    import torch
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training

    from trainer.slime.hooks import advantages, normalize_rewards

    args = SimpleNamespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
        reward_key=None,
        envd={"hosts": ["127.0.0.1:1"], "group": "tree", "credit": "siblings"},
    )
    samples = [
        sample_of(0, 1.0, [1, 1, 0, 1], episode_id="a"),
        sample_of(1, 0.0, [1, 1, 1], episode_id="b", parent_episode_id="a", shared_turns=1, first_turn=2),
    ]
    raw, rewards = normalize_rewards(args, samples)
    assert raw == [1.0, 0.0]
    data: dict[str, Any] = {"rewards": rewards, "response_lengths": [4, 3], "kl": [torch.zeros(4), torch.zeros(3)]}
    tensorize_rollout_data_for_training(data)
    # As slime's log of the columns adds them up.
    assert torch.cat(data["rewards"]).shape == (7,)
    advantages(args, data)
    assert [each.tolist() for each in data["advantages"]] == [[0.0, 0.0, 0.0, 1.0], [-1.0, -1.0, -1.0]]
    assert data["returns"] is data["advantages"]
    args.envd["credit"] = "returns"
    _, data["rewards"] = normalize_rewards(args, samples)
    with pytest.raises(ValueError, match="no advantages by token"):
        advantages(args, data)


def test_rows_of_our_own_learner_have_advantages_by_token() -> None:
    import torch

    from trainer.learn.loss import rows_of, trained_rows

    data: dict[str, list[Any]] = {
        "tokens": [[1, 2, 3], [1, 2, 3], [1, 2]],
        "response_lengths": [2, 2, 1],
        "loss_masks": [[1, 0], [1, 1], [1]],
        "rollout_log_probs": [[-0.1, 0.0], [-0.1, -0.2], [-0.3]],
        "rewards": [torch.tensor([0.5, 0.0]), torch.zeros(2), 0.25],
        "rollout_mask_sums": [1, 2, 1],
    }
    assert trained_rows(data) == [0, 2]
    rows = rows_of(data, images=[0, 0, 0])
    assert [list(row.advantages) for row in rows] == [[0.5, 0.0], [0.0, 0.0], [0.25]]
