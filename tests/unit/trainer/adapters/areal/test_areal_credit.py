"""Credit of AReaL's rows from the episodes of a group, and the settings of AReaL that contradict it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.areal import played_of
from tests.support.credit import by_definition, random_tree
from trainer.adapters.areal.checks import check_credit
from trainer.adapters.areal.group import ArealConfig, values_of
from trainer.config import InputError

SIBLINGS = {"hosts": ["127.0.0.1:1"], "group": "tree", "group_size": 4, "credit": "siblings"}


@pytest.mark.parametrize("seed", range(50))
def test_the_values_of_own_turns_are_those_of_the_definition(seed: int) -> None:
    roots, members = random_tree(random.Random(seed), limit=16)
    rewards = [member.reward for member in members]
    values = values_of(list(map(played_of, members)), rewards, ArealConfig.from_mapping(SIBLINGS))
    expected = by_definition(roots)
    for member, found in zip(members, values, strict=True):
        assert list(found) == pytest.approx(expected[member.name])


def test_returns_of_a_member_that_branched_are_those_of_its_own_turns() -> None:
    _, members = random_tree(random.Random(0), limit=16)
    config = ArealConfig.from_mapping({**SIBLINGS, "credit": "returns", "turn_discount": 0.5})
    values = values_of(list(map(played_of, members)), [1.0] * len(members), config)
    for member, found in zip(members, values, strict=True):
        own = member.turn_count - member.shared_count
        assert list(found) == [0.5**left for left in reversed(range(own))]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group": "fork"}, "credit: siblings compares members .*; set group to tree"),
        ({"turn_discount": 0.9}, "compares undiscounted returns; remove turn_discount"),
        ({"branch_roots": 4}, "group_size is 4 and branch_roots 4: no member is left to branch"),
        ({"branch_every": 15}, "would never branch"),
        ({"max_episodes": 4}, "does not count the forks"),
        ({"group": "off"}, r"envd\.group is 'off'"),
        ({"group_size": 0}, r"envd\.group_size is 0"),
        ({"group_size": "4"}, r"envd\.group_size is '4'"),
        ({"turn_discount": 1.5}, r"envd\.turn_discount is 1\.5"),
        ({"max_tokens": 3}, r"envd\.max_tokens: unknown key"),
    ],
)
def test_settings_that_contradict_a_tree_or_are_invalid_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ArealConfig.from_mapping({**SIBLINGS, **changed})


def areal(critic: Any = None, **changed: Any) -> Any:
    actor = {
        "discount": 1.0,
        "gae_lambda": 1.0,
        "kl_ctl": 0.0,
        "reward_bias": 0.0,
        "reward_norm": None,
        "overlong_reward_penalty": False,
        "mask_no_eos_with_zero": False,
        "adv_norm": SimpleNamespace(mean_level=None, std_level="batch"),
    }
    return SimpleNamespace(critic=critic, actor=SimpleNamespace(**{**actor, **changed}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"discount": 0.99}, r"actor\.discount is 0\.99, .*; set it to 1"),
        ({"gae_lambda": 0.95}, r"actor\.gae_lambda is 0\.95"),
        ({"kl_ctl": 0.1}, r"actor\.kl_ctl is 0\.1, .*; set it to 0"),
        ({"reward_bias": -0.5}, r"actor\.reward_bias is -0\.5"),
        ({"reward_norm": SimpleNamespace()}, r"actor\.reward_norm .*; set it to null"),
        ({"overlong_reward_penalty": True}, r"actor\.overlong_reward_penalty is True, .*; set it to false"),
        ({"mask_no_eos_with_zero": True}, r"actor\.mask_no_eos_with_zero is True"),
        ({"adv_norm": SimpleNamespace(mean_level="batch", std_level=None)}, r"mean_level is batch, and turns without"),
        ({"adv_norm": SimpleNamespace(mean_level=None, std_level="group")}, r"std_level is group: .*set it to batch"),
        ({"critic": SimpleNamespace()}, r"remove critic"),
    ],
)
def test_settings_of_areal_that_change_the_credit_are_refused(changed: dict[str, Any], message: str) -> None:
    check_credit(areal(**changed), ArealConfig.from_mapping({"hosts": ["h:1"]}))
    with pytest.raises(InputError, match=rf"envd\.credit siblings: .*{message}"):
        check_credit(areal(**changed), ArealConfig.from_mapping(SIBLINGS))


def test_settings_of_areal_that_keep_the_credit_pass() -> None:
    check_credit(areal(), ArealConfig.from_mapping(SIBLINGS))
    check_credit(areal(adv_norm=None), ArealConfig.from_mapping(SIBLINGS))
