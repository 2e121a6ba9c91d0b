"""Sibling credit by token, from the facts of slime's samples."""

from typing import Any

import pytest

from trainer.slime.hooks import advantages
from trainer.slime.monitor import EpisodeRecord, metrics_of
from trainer.slime.play.samples import group_credit

PATH = "trainer.slime.hooks.advantages"
SIBLINGS = {"hosts": ["127.0.0.1:1"], "group": "tree", "credit": "siblings"}


def facts(name: str, *, turns: int = 4, parent: str = "", shared: int = 0) -> dict[str, Any]:
    return {"episode_id": name, "parent_episode_id": parent, "shared_turns": shared, "turns": turns}


GROUP = [facts("a"), facts("b", parent="a", shared=2), facts("c", parent="a", shared=2)]


def test_each_reply_of_a_row_has_the_advantage_of_its_turn() -> None:
    a, b, c = group_credit(GROUP, [1.0, 0.0, 0.5], by_deviation=False)
    assert a.of_tokens([1, 1, 0, 0, 1, 0, 1, 0, 1], first_turn=1) == pytest.approx([0, 0, 0, 0, 0, 0, 0.75, 0, 0.75])
    assert b.of_tokens([1, 0, 1, 1], first_turn=3) == pytest.approx([-0.75, 0, -0.75, -0.75])
    # The second row of a rollout begins with a later reply.
    assert c.of_tokens([0, 1, 1], first_turn=4) == [0.0, 0.0, 0.0]


def test_more_replies_than_turns_are_refused() -> None:
    (credit, *_) = group_credit(GROUP, [1.0, 0.0, 0.5])
    with pytest.raises(IndexError):
        credit.of_tokens([1, 0, 1], first_turn=4)


def test_void_members_have_no_turns_and_no_names() -> None:
    found = group_credit([facts("a"), {"void": "MachineLost"}, {"void": "MachineLost"}], [1.0, None, None])
    assert [each.advantages for each in found] == [(0.0,) * 4, (), ()]


def test_rewards_by_sample_are_refused_where_advantages_by_token_are_expected() -> None:
    with pytest.raises(ValueError, match=r"envd\.credit: siblings"):
        advantages(None, {"rewards": [1.0], "response_lengths": [3], "kl": []})


def test_the_shape_of_trees_is_a_metric() -> None:
    more = {"reply_tokens": 9, "parsed": 1, "fallbacks": 0, "rows": 1, "task_score": 0.0, "reason": "done"}
    records = [
        EpisodeRecord(
            index=index,
            group_index=0,
            reward=float(index),
            facts={**found, **more, "timings_s": {}, "reward_parts": {}},
            surprise=0.0,
            sampled_count=0,
        )
        for index, found in enumerate([*GROUP, facts("d", parent="b", shared=3)])
    ]
    found = metrics_of(records)
    # Of 4 + 2 + 2 + 1 own turns, the first two have no siblings.
    assert (found["tree/branch_points"], found["tree/depth"]) == (2.0, 2.0)
    assert found["tree/branching"] == 2.5
    assert found["tree/credited_frac"] == pytest.approx(7 / 9)
    assert "tree/depth" not in metrics_of(records[:1])
