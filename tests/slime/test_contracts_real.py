"""slime's contract tests on our hooks, and our doubles against the real classes."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import slime as doubles

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def passed_count(name: str, **hooks: str) -> int:
    """Run one of slime's contract files on our hooks; return the number of passed tests."""
    home = os.environ["SLIME_HOME"]
    flags = [part for flag, path in hooks.items() for part in (f"--{flag.replace('_', '-')}-path", path)]
    command = [sys.executable, f"tests/plugin_contracts/test_plugin_{name}_contracts.py", *flags]
    ours = [str(ROOT), str(ROOT / "proto"), str(Path(__file__).parent)]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"],
        cwd=home,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*ours, home])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted, done.stdout
    return int(counted[1])


def test_generate_passes_slimes_contract_tests() -> None:
    assert passed_count("generate", custom_generate_function="contract_entries.generate") == 4


def test_the_log_and_reward_hooks_pass_slimes_contract_tests() -> None:
    count = passed_count(
        "runtime_hook",
        custom_reward_post_process="trainer.slime.hooks.normalize_rewards",
        custom_rollout_log_function="contract_entries.log_rollout",
        custom_eval_rollout_log_function="contract_entries.log_evaluation",
    )
    assert count == 10


def test_the_filter_and_the_reward_pass_slimes_contract_tests() -> None:
    count = passed_count(
        "path_loading",
        dynamic_sampling_filter="trainer.slime.hooks.keep_informative",
        custom_rm="trainer.slime.hooks.reward_func",
    )
    assert count >= 16


def test_the_sample_double_has_fields_of_the_real_class() -> None:
    from slime.utils.types import Sample

    real = {field.name: field for field in dataclasses.fields(Sample)}
    for field in dataclasses.fields(doubles.Sample):
        assert field.name in real
        if field.name not in ("spec_info", "prefix_cache_info", "status"):
            assert (field.default, field.default_factory) == (
                real[field.name].default,
                real[field.name].default_factory,
            )
    assert [status.name for status in doubles.Sample.Status] == [status.name for status in Sample.Status]
    double, original = (inspect.signature(kind.append_response_tokens) for kind in (doubles.Sample, Sample))
    assert list(double.parameters) == list(original.parameters)


def test_the_sample_double_appends_tokens_like_the_real_class() -> None:
    from slime.utils.types import Sample

    def grown(sample: Any) -> Any:
        sample.tokens = [1, 2]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "3"}
        sample.append_response_tokens(None, tokens=[3], log_probs=[-1.0], meta_info=meta, text="a")
        sample.append_response_tokens(None, tokens=[4, 5], trainable=False, text="b")
        for mistake in ({"tokens": [6]}, {"tokens": [6], "log_probs": [-1.0], "trainable": False}):
            with pytest.raises(ValueError, match=r"log.prob"):
                sample.append_response_tokens(None, **mistake)
        names = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions")
        return [getattr(sample, name) for name in names]

    assert grown(doubles.Sample()) == grown(Sample())


def test_slime_has_all_functions_that_we_use() -> None:
    from slime.observability import logging_utils, metric_utils, trace_utils
    from slime.rollout import sglang_rollout
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    from slime.utils import http_utils

    assert {"keep", "reason"} <= {field.name for field in dataclasses.fields(DynamicFilterOutput)}
    assert {"url", "payload", "max_retries", "headers"} <= set(inspect.signature(http_utils.post).parameters)
    assert list(inspect.signature(sglang_rollout.GenerateState.__init__).parameters) == ["self", "args"]
    assert {"target", "name", "attrs"} <= set(inspect.signature(trace_utils.trace_span).parameters)
    assert callable(trace_utils.build_sglang_meta_trace_attrs)
    assert {"args", "metrics", "step_key"} == set(inspect.signature(logging_utils.log).parameters)
    assert {"args", "rollout_id"} == set(inspect.signature(metric_utils.compute_rollout_step).parameters)
