"""The mapping `envd:`, and the checks of slime's own arguments."""

import dataclasses
from argparse import Namespace
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from cuaenv.client import Pool, Tls
from trainer.agent.settings import AgentSettings
from trainer.config import STRICT, InputError, parse
from trainer.slime.checks import capacity_warning, refusals, row_unit, tree_obstacle, warnings
from trainer.slime.config import Halt, SlimeConfig
from trainer.slime.job import job_of

HOSTS = {"hosts": ["127.0.0.1:50051"]}
ADVANTAGES = "trainer.slime.hooks.advantages"
BY_TOKEN = {"custom_advantage_function_path": ADVANTAGES}
SIBLINGS = {"group": "tree", "credit": "siblings"}
OTHER_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def config(**mapping: Any) -> SlimeConfig:
    return SlimeConfig.from_mapping({**HOSTS, **mapping})


def test_only_hosts_is_mandatory() -> None:
    assert config() == SlimeConfig(hosts=("127.0.0.1:50051",))
    with pytest.raises(InputError, match=r"envd\.hosts: missing"):
        SlimeConfig.from_mapping({})


def test_every_part_is_parsed() -> None:
    read = config(
        hosts="dns:///desktops:50051",
        tls={"ca": "ca.pem"},
        max_episodes=8,
        group_wait_s=5,
        reward={"recipe": "shaped", "share": 0.3},
        halt={"below": {"parsed_frac": 0.5}, "above": {"ended/reply": 0.9}, "rollouts": 3},
        agent={"max_turns": 3},
    )
    assert read.halt == Halt(below={"parsed_frac": 0.5}, above={"ended/reply": 0.9}, rollouts=3)
    assert read.client.targets == ("dns:///desktops:50051",)
    assert (read.client.tls, read.client.max_episodes) == (Tls(ca=Path("ca.pem")), 8)
    assert (read.group_wait_s, read.agent.max_turns, read.recipe) == (5.0, 3, config(reward=read.reward).recipe)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"host": "a:1"}, r"envd\.host: unknown key; did you mean hosts\?"),
        ({"agent": {"max_turn": 3}}, r"envd\.agent\.max_turn: unknown key; did you mean max_turns\?"),
        ({"tls": {"certificate": "x"}}, r"envd\.tls\.certificate: unknown key; known keys: ca, cert, key"),
        ({"tls": {"cert": "x"}}, r"envd\.tls\.ca: missing"),
        ({"tls": {"ca": "x", "cert": "x"}}, r"envd\.tls: .*only one of cert and key"),
        ({"reward": {"recipe": "best"}}, r"envd\.reward: unknown reward 'best'"),
        ({"reward": {"recipe": "task", "alpha": 1}}, r"envd\.reward: task\.alpha: unknown key"),
        ({"group": "forks"}, r"envd\.group is 'forks'; it must be 'fork', 'tree' or 'off'"),
        ({"branch_ways": 1}, r"envd\.branch_ways is 1; it must be at least 2"),
        ({"branch_every": 0}, r"envd\.branch_every is 0; it must be at least 1"),
        (
            {"group": "tree", "branch_every": 15},
            r"envd: branch_every is 15, but .* at most 15 turns .* would never branch",
        ),
        ({"group": "tree", "max_episodes": 4}, r"envd: max_episodes is 4, which does not count the forks"),
        ({"credit": "siblings"}, r"envd: credit: siblings compares members .*; set group to tree"),
        ({**SIBLINGS, "replay": {"max_total": 4}}, "credit: siblings compares members that branched"),
        ({"replay": {"sead": 1}}, r"envd\.replay\.sead: unknown key; did you mean seed"),
        ({"replay": {"demonstrations": True}}, r"envd\.replay\.demonstrations: unknown key"),
        ({"replay": {"files": "a.jsonl"}}, r"envd\.replay\.files is 'a\.jsonl'"),
        ({"replay": {"success_at": 0}}, r"envd\.replay\.success_at is 0"),
        ({"replay": {"seed": 0, "max_per_task": "ten"}}, r"envd\.replay\.max_per_task"),
        ({"halt": {"bellow": {}}}, r"envd\.halt\.bellow: unknown key; did you mean below\?"),
        ({"halt": {"below": {"entropy": 1}}}, r"envd\.halt: metric entropy: unknown; did you mean"),
        ({"halt": {"below": 0.5}}, r"envd\.halt\.below is 0\.5"),
        ({"halt": {"above": {"void_frac": "1"}}}, r"envd\.halt\.above\.void_frac is"),
        ({"halt": {"rollouts": 1.5}}, r"envd\.halt\.rollouts is 1\.5"),
        ({"halt": {"rollouts": 0}}, r"envd\.halt: rollouts is 0"),
        ({"attempts": 0}, r"envd\.attempts is 0"),
        ({"attempts": "2"}, r"envd\.attempts is '2'"),
        ({"attempts": True}, r"envd\.attempts is True"),
        ({"group_wait_s": -1}, r"envd\.group_wait_s is -1"),
        ({"max_episodes": -1}, r"envd\.max_episodes is -1"),
        ({"hosts": []}, r"envd\.hosts is \[\]; .* at least 1 item"),
        ({"hosts": [1]}, r"envd\.hosts\.0 is 1"),
        ({"agent": {"context_tokens": 1000}}, r"envd\.agent: an episode does not fit"),
        ({"engine_timeout_s": 1000}, r"envd: engine_timeout_s is 1000, longer than an episode"),
    ],
)
def test_invalid_values_are_refused_by_name(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(**mapping)


def test_args_without_a_mapping_are_refused_with_the_flag() -> None:
    with pytest.raises(InputError, match="--custom-config-path"):
        job_of(Namespace())


@pytest.mark.parametrize("value", [date(2026, 11, 28), {"a"}])
def test_values_that_yaml_makes_of_texts_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="write a text in quotes"):
        config(run=value)


def test_a_misspelt_key_below_a_list_or_a_mapping_is_named() -> None:
    class Item(BaseModel):
        model_config = STRICT
        score: float = 0.0

    class Settings(BaseModel):
        model_config = STRICT
        items: tuple[Item, ...] = ()
        by_id: Mapping[str, Item] = Field(default_factory=dict)

    for mapping in ({"items": [{}, {"scores": 1.0}]}, {"by_id": {"x": {"scores": 1.0}}}):
        with pytest.raises(InputError, match=r"scores: unknown key; did you mean score"):
            parse(Settings, mapping)


@pytest.mark.parametrize(
    ("args", "mapping", "message"),
    [
        ({"partial_rollout": True}, {"agent": {"images_per_row": 4}}, "continues samples of one row"),
        ({"partial_rollout": True}, {"group": "tree"}, "members of a tree cannot be continued"),
        ({"n_samples_per_prompt": 8}, {"max_episodes": 4}, "a group of 8"),
        ({}, {"workers": 2, "max_episodes": 4, "group": "off"}, "each of envd.workers would count alone"),
        ({}, {"workers": 2, "replay": {"files": ["a.jsonl"]}}, "successes of a worker do not reach the pool"),
        (
            {"custom_reward_post_process_path": "mine.post"},
            {"replay": {"seed": 1}},
            "replayed samples get their screen",
        ),
        ({"custom_convert_samples_to_train_data_path": "mine.c"}, {"replay": {"seed": 1}}, "replayed samples get"),
        ({"context_parallel_size": 2}, {}, "not split over context-parallel ranks"),
        ({"log_passrate": True}, {"agent": {"images_per_row": 4}}, "pass rates over rows"),
        ({"use_tis": False}, {"replay": {"seed": 1}}, "--use-tis or --use-rollout-logprobs"),
        ({"rollout_top_p": 0.95}, {"replay": {"seed": 1}}, "no top-p sets"),
        (
            {"data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer"},
            {"curriculum": "solve_rate"},
            "curriculum solve_rate: set --data-source-path to trainer.slime.hooks.data_source, which applies it",
        ),
        ({}, SIBLINGS, f"add --custom-advantage-function-path {ADVANTAGES}"),
        ({"custom_advantage_function_path": ADVANTAGES}, {}, "set envd.credit to siblings"),
        ({**BY_TOKEN, "custom_reward_post_process_path": "mine.f"}, SIBLINGS, "--custom-reward-post-process-path"),
        ({**BY_TOKEN, "advantage_estimator": "ppo"}, SIBLINGS, "--advantage-estimator"),
        ({**BY_TOKEN, "rewards_normalization": False}, SIBLINGS, "with normalised rewards"),
        ({"rollout_max_context_len": 8192}, {}, "32768, but --rollout-max-context-len is 8192"),
        (
            {
                "use_dynamic_batch_size": False,
                "micro_batch_size": 2,
                "actor_num_nodes": 1,
                "actor_num_gpus_per_node": 8,
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 1,
                "context_parallel_size": 1,
            },
            {"agent": {"images_per_row": 4}},
            "a multiple of 4 rows",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(args: dict[str, Any], mapping: dict[str, Any], message: str) -> None:
    (refusal,) = refusals(Namespace(**args), config(**mapping))
    assert message in refusal


def test_valid_arguments_are_accepted() -> None:
    text_only = config(agent={"text_only": True, "a11y_tree": True})
    assert not list(refusals(Namespace(context_parallel_size=2), text_only))
    assert not list(refusals(Namespace(), config()))
    assert not list(warnings(Namespace(), config()))
    assert not list(refusals(Namespace(use_tis=False, use_rollout_logprobs=True), config(replay={"seed": 1})))
    ours = Namespace(data_source_path="trainer.slime.hooks.data_source")
    assert not list(refusals(ours, config(curriculum="solve_rate")))
    assert not list(refusals(Namespace(**BY_TOKEN), config(**SIBLINGS)))


def test_dynamic_batches_accept_any_number_of_rows() -> None:
    assert row_unit(Namespace(use_dynamic_batch_size=True)) == 0


@pytest.mark.parametrize(
    ("args", "mapping", "problem"),
    [
        ({"custom_reward_post_process_path": None}, {}, "rewards of void samples may enter"),
        ({"rollout_max_response_len": 128}, {}, "512, is never reached"),
        ({"dynamic_sampling_filter_path": OTHER_FILTER}, {}, "void samples may count as failures"),
        ({"custom_rollout_log_function_path": None}, {}, "no envd/* metrics are logged"),
        (
            {"custom_eval_rollout_log_function_path": None, "eval_prompt_data": ["held", "held_out.jsonl"]},
            {},
            "void samples lower eval/NAME",
        ),
        ({"data_source_path": "mine.Source"}, {"replay": {"seed": 1}}, "the replay pool is lost"),
        ({"data_source_path": "mine.Source", "partial_rollout": True}, {}, "aborted samples are lost"),
    ],
)
def test_arguments_that_work_badly_cause_warnings(args: dict[str, Any], mapping: dict[str, Any], problem: str) -> None:
    (warning,) = warnings(Namespace(**args), config(**mapping))
    assert problem in warning


def test_without_evaluations_or_a_filter_their_hooks_may_be_missing() -> None:
    args = Namespace(custom_eval_rollout_log_function_path=None, eval_datasets=[], dynamic_sampling_filter_path=None)
    assert not list(warnings(args, config()))


@pytest.mark.parametrize(
    ("concurrency", "group_size", "capacity", "is_forked", "said"),
    [
        (16, 8, 16, True, None),
        (12, 8, 12, True, "need 16 machines"),
        (12, 8, 12, False, None),
        (512, 8, 16, False, "there are 16"),
        (4, 8, 16, True, "wait to start are idle"),
    ],
)
def test_more_episodes_than_machines_cause_a_warning(
    concurrency: int, group_size: int, capacity: int, is_forked: bool, said: str | None
) -> None:
    warning = capacity_warning(concurrency=concurrency, group_size=group_size, capacity=capacity, is_forked=is_forked)
    assert warning is None if said is None else said in (warning or "")


def test_a_tree_is_refused_where_machines_cannot_be_copied() -> None:
    forks = Pool(
        name="desktop", image="desktop", accelerator="kvm", capacity=2, idle_count=0, leased_count=0, dying_count=0,
        waiting_count=0, is_failing=False, problem="", host="a:1",
    )  # fmt: skip
    containers = dataclasses.replace(forks, host="b:1", not_forkable="containers cannot be copied")
    assert tree_obstacle([forks]) is None
    assert tree_obstacle([forks, containers]) == (
        "envd.group is tree, but pool desktop of b:1 has no branches: containers cannot be copied"
    )


@pytest.mark.parametrize("names", [SlimeConfig.model_fields, [one.name for one in dataclasses.fields(AgentSettings)]])
def test_every_key_is_in_the_guide(names: Collection[str]) -> None:
    guide = Path(__file__).parents[4].joinpath("docs/train-settings.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in guide] == []


def test_a_row_starts_at_its_task_which_other_columns_may_name() -> None:
    config = SlimeConfig.from_mapping({"hosts": ["h:1"], "task_key": "name"})
    assert config.start_of_row({"name": "a/b"}, {"name": "a/c"}) == "a/b"
    assert config.start_of_row({"prompt": ""}, {"name": "a/c"}) == "a/c"
    with pytest.raises(InputError, match=r"no task id; add name \(envd.task_key\) .*; it has prompt"):
        config.start_of_row({"prompt": ""}, {})
