"""Check AReaL's settings against `credit: siblings`.

AReaL 1.0.4 has no hook for advantages. It adds a row's reward to the row's last token, and sums rewards backwards over
the row's trained tokens with `discount` and `gae_lambda`. A row is one turn. With both at 1, no critic and no KL
penalty, the advantage of each token is the row's reward: the credit that `trainer.adapters.areal.group` puts there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.adapters.areal.group import ArealConfig
from trainer.config import InputError

_NEUTRAL: Mapping[str, object] = {
    "discount": 1,
    "gae_lambda": 1,
    "kl_ctl": 0,
    "reward_bias": 0,
    "reward_norm": None,
    "overlong_reward_penalty": False,
    "mask_no_eos_with_zero": False,
}
"""Settings of `actor` with which AReaL does not change the credit."""


def check_credit(config: Any, envd: ArealConfig) -> None:
    """Refuse settings with which AReaL's advantages are not the credit of `envd`.

    Args:
        config: `areal.api.cli_args.GRPOConfig` or a subclass.
        envd: The settings of its workflow.

    Raises:
        InputError: A setting of AReaL contradicts `credit: siblings`.
    """
    if envd.credit == "siblings":
        for problem in _refusals(config):
            raise InputError(f"envd.credit siblings: {problem}")


def _refusals(config: Any) -> Iterator[str]:
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config.actor, name)) != neutral:
            expected = "null" if neutral is None else str(neutral).lower()
            yield f"actor.{name} is {value}, and AReaL would change the advantages; set it to {expected}"
    if config.critic is not None:
        yield "AReaL would subtract the values of the critic from the advantages; remove critic"
    norm = config.actor.adv_norm
    if norm is not None and norm.mean_level is not None:
        yield (
            f"actor.adv_norm.mean_level is {norm.mean_level}, and turns without siblings would get credit; set it to"
            " null"
        )
    if norm is not None and norm.std_level == "group":
        yield (
            "actor.adv_norm.std_level is group: AReaL takes a fixed number of rows for a group; set it to batch or null"
        )
