"""Sibling credit through AReaL's own configuration, batches and `PPOActor`: its advantages are our estimator."""

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.areal import ScriptedEngine, played_of
from tests.support.counting import counting_apart
from tests.support.credit import by_definition, random_tree
from tests.support.server import serve_fake
from tests.support.slime import Tokenizer
from trainer.adapters.areal.checks import check_credit
from trainer.adapters.areal.engine import TurnRow
from trainer.adapters.areal.group import ArealConfig, values_of
from trainer.adapters.areal.rows import batch
from trainer.config import InputError
from trainer.recipes.catalogue import effective
from trainer.tokens.chat import Chat

pytestmark = [pytest.mark.areal, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

ENVD = {"hosts": ["127.0.0.1:1"], "group": "tree", "group_size": 16, "credit": "siblings"}
NORM = {"mean_level": None, "std_level": "batch"}


def areal_config(directory: Path, **actor: Any) -> Any:
    """Return AReaL's configuration of our recipe, with other settings of its actor."""
    from areal.api.cli_args import parse_cli_args, to_structured_cfg
    from omegaconf import OmegaConf

    from trainer.adapters.areal.train import DesktopGRPOConfig

    held = dict(effective("areal_osworld", stage="full"))
    held["actor"] = {**held["actor"], "use_decoupled_loss": False, "recompute_logprob": False, **actor}
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(held, sort_keys=False))
    read, _ = parse_cli_args(["--config", str(file)])
    return OmegaConf.to_object(to_structured_cfg(read, config_cls=DesktopGRPOConfig))


@pytest.fixture(autouse=True)
def without_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `areal.trainer.ppo` load without `areal.trainer`, which imports the clients of four logging services."""
    import areal

    package = ModuleType("areal.trainer")
    package.__path__ = [str(Path(areal.__file__).parent / "trainer")]
    monkeypatch.setitem(sys.modules, "areal.trainer", package)


def learned(config: Any, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups as AReaL's learner gets them."""
    from areal.trainer.ppo.actor import PPOActor

    found: list[dict[str, Any]] = PPOActor(config.actor, engine=None).compute_advantages([dict(one) for one in batches])
    return found


def trained(group: Mapping[str, Any]) -> list[list[float]]:
    """Return the advantages of each row's trained tokens."""
    rows = zip(group["advantages"], group["loss_mask"].bool(), strict=True)
    return [values[mask].tolist() for values, mask in rows]


def random_group(seed: int) -> tuple[dict[str, Any], list[float]]:
    """Return the batch of a random tree, and the credit of each row by definition."""
    rng = random.Random(seed)
    roots, members = random_tree(rng, limit=16)
    rewards = [member.reward for member in members]
    rows: list[TurnRow] = []
    expected: list[float] = []
    for member, values in zip(
        members, values_of(list(map(played_of, members)), rewards, ArealConfig.from_mapping(ENVD)), strict=True
    ):
        if member.reward is None:
            continue
        expected += by_definition(roots)[member.name]
        for value in values:
            prompt, reply = rng.randint(1, 9), rng.randint(1, 6)
            turn = TurnRow(
                input_ids=(1,) * prompt,
                output_ids=(2,) * reply,
                log_probs=(-0.7,) * reply,
                versions=(0,) * reply,
                images=(),
                value=value,
            )
            rows.append(turn)
    return batch(rows, Chat(Tokenizer(), None)), expected


def groups() -> tuple[list[dict[str, Any]], list[list[float]]]:
    made = [random_group(seed) for seed in range(40)]
    return [each[0] for each in made], [each[1] for each in made]


def test_areals_advantages_are_the_credit_of_the_definition(tmp_path: Path) -> None:
    config = areal_config(tmp_path, adv_norm=None)
    check_credit(config, ArealConfig.from_mapping(ENVD))
    batches, expected = groups()
    for group, values in zip(learned(config, batches), expected, strict=True):
        for tokens, value in zip(trained(group), values, strict=True):
            assert tokens == pytest.approx([value] * len(tokens), abs=1e-6)


def test_areals_normalisation_divides_all_of_a_batch_by_one_number(tmp_path: Path) -> None:
    config = areal_config(tmp_path, adv_norm=NORM)
    check_credit(config, ArealConfig.from_mapping(ENVD))
    batches, expected = groups()
    found = [
        (token, value)
        for group, values in zip(learned(config, batches), expected, strict=True)
        for tokens, value in zip(trained(group), values, strict=True)
        for token in tokens
    ]
    assert all(token == pytest.approx(0, abs=1e-6) for token, value in found if value == 0)
    scales = [token / value for token, value in found if value]
    assert len(scales) > 100
    assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {"discount": 0.9},
        {"kl_ctl": 0.1},
        {"reward_bias": 0.5},
        {"mask_no_eos_with_zero": True},
        {"reward_norm": {"mean_level": "batch", "std_level": None}},
        {"adv_norm": {"mean_level": "batch", "std_level": None}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_refused_settings_would_change_the_advantages(changed: dict[str, Any], tmp_path: Path) -> None:
    config = areal_config(tmp_path, **{"adv_norm": None, **changed})
    with pytest.raises(InputError, match=next(iter(changed))):
        check_credit(config, ArealConfig.from_mapping(ENVD))
    batches, expected = groups()
    found = [tokens for group in learned(config, batches) for tokens in trained(group)]
    values = [value for group in expected for value in group]
    assert any(
        tokens != pytest.approx([value] * len(tokens), abs=1e-3) for tokens, value in zip(found, values, strict=True)
    )


async def test_the_workflow_trains_each_turn_of_a_tree_once(tmp_path: Path) -> None:
    import torch
    from areal.api import ModelResponse
    from areal.api.cli_args import GenerationHyperparameters

    from trainer.adapters.areal.workflow import DesktopWorkflow

    engine = ScriptedEngine(counting_apart(), response=ModelResponse)
    agent = {"max_turns": 4, "prompt_tokens": 8192, "reply_tokens": 400, "text_only": True, "a11y_tree": True}
    async with serve_fake(size=2) as server:
        workflow = DesktopWorkflow(
            gconfig=GenerationHyperparameters(n_samples=1, max_new_tokens=7),
            tokenizer=Tokenizer(),
            envd={**ENVD, "hosts": [server.address], "group_size": 2, "branch_every": 1, "agent": agent, "attempts": 1},
        )
        rows = await workflow.arun_episode(engine, {"task_id": "fake/count-to-five"})
    assert rows is not None
    (group,) = learned(areal_config(tmp_path, adv_norm=None), [rows])
    assert len(engine.requests) == len(rows["input_ids"]) == 4
    prompts = (rows["attention_mask"].sum(1) - rows["loss_mask"].sum(1)).tolist()
    credit = sorted((prompt, *set(tokens)) for prompt, tokens in zip(prompts, trained(group), strict=True))
    # The shared turn has no siblings; the two turns after it have each other, and the last one is its segment's.
    assert [value for _, value in credit[:1]] + sorted(value for _, value in credit[1:]) == [0.0, -1.0, 1.0, 1.0]
    assert torch.isfinite(group["advantages"]).all()
