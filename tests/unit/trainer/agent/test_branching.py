"""The policy of branching: when other members branch off."""

import pytest

from trainer.agent.training import GroupConfig
from trainer.agent.types import Reply


@pytest.mark.parametrize(
    ("above", "turns_since", "log_probs", "expected"),
    [
        (None, 3, (-9.0,), False),
        (None, 4, (-0.1,), True),
        (1.0, 1, (-0.5, -1.6), True),
        (1.0, 1, (-0.5, -1.4), False),
        (1.0, 1, (), False),
        (1.0, 4, (), True),
    ],
)
def test_members_branch_after_some_turns_or_at_an_unsure_reply(
    above: float | None, turns_since: int, log_probs: tuple[float, ...], expected: bool
) -> None:
    config = GroupConfig(hosts=("h:1",), group="tree", branch_every=4, branch_above=above)
    reply = Reply(text="x", log_probs=log_probs)
    assert config.branch_policy(turns_since=turns_since, reply=reply) == expected
