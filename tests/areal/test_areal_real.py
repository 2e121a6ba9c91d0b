"""AReaL itself runs our workflow: its own classes, its own check of what a workflow returns, torch's tensors.

Run by `make areal-proof`, in an environment that has areal. Elsewhere `tests/e2e/test_areal_group.py` has doubles stand
for AReaL; here it is checked that they have the real ones' fields.
"""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuaenv.client import Action, Click, Done
from tests.support.areal import ModelResponse, ScriptedEngine
from tests.support.faulty import Faults
from tests.support.server import serve_fake
from tests.support.slime import Processor, Tokenizer
from trainer.adapters.areal.group import ArealConfig
from trainer.agent.grammars import grammar
from trainer.config import InputError
from trainer.recipes.catalogue import effective

pytestmark = [
    pytest.mark.areal,
    pytest.mark.timeout(300),
    # AReaL's own dependencies warn of each other.
    pytest.mark.filterwarnings("ignore"),
]

PLAN: list[list[Action]] = [[Click(640, 125, count=3)], [Click(640, 125, count=2)], [Done()]]
AGENT = {"max_turns": 4, "prompt_tokens": 8192, "reply_tokens": 400, "image_max_pixels": 65_536}


def counting(prompt: str) -> str:
    return grammar("qwen3-vl").render(PLAN[prompt.count("<|im_start|>assistant\n") - 1])


def eyes() -> Any:
    """The doubles' processor with transformers' own image processor, which makes real tensors."""
    from transformers import Qwen2VLImageProcessorPil

    processor = Processor()
    processor.image_processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 1 << 24}
    )
    return processor


@asynccontextmanager
async def workflow(*, n_samples: int = 1, **options: Any) -> AsyncIterator[Any]:
    from areal.api.cli_args import GenerationHyperparameters

    from trainer.adapters.areal.workflow import DesktopWorkflow

    agent = options.pop("agent", AGENT)
    async with serve_fake(size=2, **options) as server:
        yield DesktopWorkflow(
            gconfig=GenerationHyperparameters(n_samples=n_samples, max_new_tokens=7),
            tokenizer=Tokenizer(),
            processor=eyes(),
            envd={"hosts": [server.address], "agent": agent, "attempts": 1},
        )
        assert server.pool.statistics().leased_count == 0


def real_response(**fields: Any) -> Any:
    from areal.api import ModelResponse as Real

    return Real(**fields)


async def test_areal_accepts_the_rows_of_a_group() -> None:
    import torch
    from areal.api.workflow_api import RolloutWorkflow
    from areal.infra.workflow_executor import check_trajectory_format
    from areal.utils.data import concat_padded_tensors

    engine = ScriptedEngine(counting, response=real_response)
    async with workflow() as ours:
        assert isinstance(ours, RolloutWorkflow)
        rows = await ours.arun_episode(engine, {"task_id": "fake/count-to-five"})
    assert check_trajectory_format(rows)
    assert {name: (tuple(value.shape), value.dtype) for name, value in rows.items() if torch.is_tensor(value)} == {
        name: ((6, rows["input_ids"].shape[1]), dtype)
        for name, dtype in {
            "input_ids": torch.long,
            "loss_mask": torch.int32,
            "logprobs": torch.float32,
            "versions": torch.int32,
            "attention_mask": torch.bool,
            "mm_token_type_ids": torch.long,
        }.items()
    } | {"rewards": ((6,), torch.float32)}
    assert [len(images["image_grid_thw"]) for images in rows["multi_modal_input"]] == [1, 2, 3] * 2
    for index, images in enumerate(rows["multi_modal_input"]):
        # What the vision tower makes of the pixels has a place in the row.
        assert int(images["image_grid_thw"].prod(dim=1).sum()) // 4 == int(rows["mm_token_type_ids"][index].sum())
        assert len(images["pixel_values"]) == int(images["image_grid_thw"].prod(dim=1).sum())
    # Groups of different tasks are joined to a batch by AReaL's own function.
    batch = concat_padded_tensors([rows, rows])
    assert batch["input_ids"].shape[0] == len(batch["multi_modal_input"]) == 12
    request = engine.requests[0]
    assert (request.gconfig.n_samples, request.gconfig.max_new_tokens, request.gconfig.max_tokens) == (1, 400, 32_768)
    assert isinstance(request.image_data[0], str)


async def test_a_lost_group_is_rejected() -> None:
    async with workflow(faults=Faults(die_after_inputs=0)) as ours:
        engine = ScriptedEngine(counting, response=real_response)
        assert await ours.arun_episode(engine, {"task_id": "fake/count-to-five"}) is None


async def test_without_pictures_there_are_no_image_columns() -> None:
    async with workflow(agent={**AGENT, "text_only": True, "a11y_tree": True}) as ours:
        engine = ScriptedEngine(counting, response=real_response)
        rows = await ours.arun_episode(engine, {"task_id": "fake/count-to-five"})
    assert not {"multi_modal_input", "mm_token_type_ids"} & rows.keys()


async def test_n_samples_above_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"n_samples is 4.*group_size"):
        async with workflow(n_samples=4):
            pass


def test_a_model_without_a_processor_is_refused_unless_text_only() -> None:
    from areal.api.cli_args import GenerationHyperparameters

    from trainer.adapters.areal.workflow import DesktopWorkflow

    def make(**agent: Any) -> None:
        DesktopWorkflow(
            gconfig=GenerationHyperparameters(n_samples=1),
            tokenizer=Tokenizer(),
            processor=None,
            envd={"hosts": ["127.0.0.1:1"], "agent": {**AGENT, **agent}},
        )

    with pytest.raises(InputError, match=r"processor None: transformers cannot load it.*text_only"):
        make()
    make(text_only=True, a11y_tree=True)


def test_the_response_double_has_the_fields_of_the_real_class() -> None:
    from areal.api import ModelResponse as Real

    real = {one.name for one in dataclasses.fields(Real)}
    assert {one.name for one in dataclasses.fields(ModelResponse)} <= real


async def test_areals_grouping_joins_our_groups() -> None:
    from areal.infra.remote_inf_engine import GroupedRolloutWorkflow

    async with workflow() as ours:
        engine = ScriptedEngine(counting, response=real_response)
        grouped = GroupedRolloutWorkflow(ours, group_size=2, logger=None)
        rows = await grouped.arun_episode(engine, {"task_id": "fake/count-to-five"})
    assert rows is not None
    assert rows["input_ids"].shape[0] == 12


@pytest.mark.parametrize("stage", ["smoke-text", "smoke", "full"])
def test_areal_accepts_the_recipe_in_every_stage(stage: str, tmp_path: Path) -> None:
    config = load(effective("areal_osworld", stage=stage), tmp_path)
    assert (config.actor.eps_clip, config.rollout.max_head_offpolicyness) == (0.4, 4)
    assert config.actor.rejection_sampling.upper == 5.0
    # What the workflow is started with in AReaL's workers.
    assert ArealConfig.from_mapping(config.envd).agent.max_turns == (15 if stage == "full" else 3)


def test_areal_refuses_unknown_keys(tmp_path: Path) -> None:
    held = dict(effective("areal_osworld", stage="full"))
    held["actor"] = {**held["actor"], "eps_clipp": 0.4}
    with pytest.raises(Exception, match="eps_clipp"):
        load(held, tmp_path)


def load(held: Mapping[str, Any], directory: Path) -> Any:
    from areal.api.cli_args import parse_cli_args, to_structured_cfg
    from omegaconf import OmegaConf

    from trainer.adapters.areal.train import DesktopGRPOConfig

    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(dict(held), sort_keys=False))
    read, _ = parse_cli_args(["--config", str(file)])
    return OmegaConf.to_object(to_structured_cfg(read, config_cls=DesktopGRPOConfig))


def test_tasks_are_read_line_by_line(tmp_path: Path) -> None:
    from trainer.adapters.areal.train import read_rows

    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": [], "metadata": {"task_id": "fake/enable"}}\n')
    assert read_rows(file, task_key="task_id") == [{"task_id": "fake/enable"}]
    file.write_text("{}\n")
    with pytest.raises(InputError, match="is not a list of tasks"):
        read_rows(file, task_key="task_id")
