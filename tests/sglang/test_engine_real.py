"""SGLang's own server on a CPU: our contract, and slime's rollouts with several screenshots in each episode."""

import itertools
import logging
import os
import statistics
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import EnvClient
from tests.support.engine_contract import TOLERANCE, EngineContract, picture, post, request_for
from tests.support.sglang import SglangServer
from tests.support.sglang_process import ROOT, SglangProcess, router_of
from tests.support.slime_job import SlimeJob, check_train_data, counting_job, log_prob_gaps
from trainer.agent.types import Message
from trainer.slime import job as registry
from trainer.slime.play.samples import facts_of, flatten, is_void
from trainer.tokens.chat import Chat

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]

AGENT = {
    "max_turns": 5,
    "image_max_pixels": 65_536,
    "reply_tokens": 16,
    "prompt_tokens": 4096,
    "context_tokens": 8192,
    "timeout_s": 900.0,
}


class TestContract(EngineContract):
    """All tests are inherited."""


async def test_the_cache_of_prefixes_changes_no_log_probability(
    engine: SglangProcess, chat: Chat, model: SglangServer
) -> None:
    prompt = chat.opening([Message("user", (picture(256, 160), "Look."))])
    _, first = await post(engine, "generate", request_for(chat, prompt))
    sampled = [entry[1] for entry in first["meta_info"]["output_token_logprobs"]]
    request = request_for(chat, prompt, extra=sampled)
    _, answer = await post(engine, "generate", request)
    assert answer["meta_info"]["cached_tokens"] > len(prompt.train_ids) // 2
    entries = answer["meta_info"]["output_token_logprobs"]
    bias = {int(token): value for token, value in request["sampling_params"]["logit_bias"].items()}
    inputs = model.pixels(prompt.images)
    ids = [entry[1] for entry in entries]
    recomputed = model.log_probs([*prompt.train_ids, *sampled], ids, inputs, bias=bias)
    assert [entry[0] for entry in entries] == pytest.approx(recomputed, abs=TOLERANCE)


@contextmanager
def job_of(
    directory: Path,
    checkpoint: Path,
    engine: SglangProcess,
    fake_daemon: str,
    *,
    agent: dict[str, Any] | None = None,
    **changed: Any,
) -> Iterator[SlimeJob]:
    """Yield a job with SGLang's router in front of the engine."""
    mapping = {"hosts": [fake_daemon], "engine_retries": 600, "agent": {**AGENT, **(agent or {})}}
    with (
        router_of(engine, directory / "router.log") as port,
        counting_job(mapping, checkpoint, directory, engine=(engine.host, port), **changed) as job,
    ):
        yield job


@pytest.fixture
def make_job(checkpoint: Path, engine: SglangProcess, fake_daemon: str, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda **changed: stack.enter_context(job_of(tmp_path, checkpoint, engine, fake_daemon, **changed))


def test_trained_rows_have_the_models_log_probabilities(make_job: Any, model: SglangServer) -> None:
    job = make_job(n_samples_per_prompt=4, rollout_batch_size=2, over_sampling_batch_size=2, global_batch_size=8)
    samples = flatten(job.rollout().samples)
    check_train_data(job, [samples])
    valid = [sample for sample in samples if not is_void(sample)]
    # Random weights sample placeholders; such a sample is void.
    assert len(valid) >= 2, [facts_of(sample) for sample in samples]
    assert all(facts_of(sample)["turns"] == 5 for sample in valid)
    gaps = list(itertools.chain.from_iterable(log_prob_gaps(sample, model) for sample in valid))
    mean, worst = statistics.fmean(gaps), max(gaps)
    print(f"\n{5 * len(valid)} turns, {len(gaps)} tokens: mean gap {mean:.5f}, worst {worst:.5f}")
    # The trainer's pixels have half precision; the mean is as close as that allows.
    assert mean < TOLERANCE / 2


def test_slimes_abort_reaches_the_engine_and_releases_all_machines(make_job: Any, fake_daemon: str) -> None:
    job = make_job(rollout_batch_size=1, over_sampling_batch_size=3)
    check_train_data(job, job.rollout().samples)
    with EnvClient(fake_daemon) as client:
        (pool,) = client.list_pools()
    assert pool.leased_count == 0


def test_an_engine_that_is_restarted_within_a_rollout_loses_no_episode(
    make_job: Any, engine: SglangProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = import_module("slime.utils.http_utils")
    replies = itertools.count()
    send = http.post

    async def post_and_count(*args: Any, **options: Any) -> Any:
        answer = await send(*args, **options)
        if next(replies) == 3:
            engine.kill()
            threading.Thread(target=engine.start).start()
        return answer

    monkeypatch.setattr(http, "post", post_and_count)
    samples = flatten(make_job().rollout().samples)
    engine.wait_until_ready()
    # Random weights sample placeholders, also in first replies; no sample is void for the restart.
    assert {facts_of(sample).get("void") for sample in samples} <= {None, "NoReply"}
    assert {facts_of(sample)["attempts"] for sample in samples if not is_void(sample)} <= {1}


@pytest.mark.parametrize("is_fixed", [False, True])
def test_our_patch_lets_slimes_engine_keep_ids(
    is_fixed: bool, tmp_path: Path, checkpoint: Path, fake_daemon: str, caplog: pytest.LogCaptureFixture
) -> None:
    """slime's patch makes SGLang read other ids: a warning at the start, and void samples. Ours corrects that."""
    installed = Path(sysconfig.get_path("purelib")) / "sglang"
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    subprocess.run(["cp", "-rs", installed, overlay / "sglang"], check=True)
    changed = overlay / "sglang/srt/multimodal/processors/qwen_vl.py"
    text = changed.read_text(encoding="utf-8")
    changed.unlink()
    changed.write_text(text, encoding="utf-8")
    upstream = Path(os.environ["SLIME_HOME"]) / "docker/patch/v0.5.15.post1/sglang.patch"
    only = "--include=sglang/srt/multimodal/processors/qwen_vl.py"
    subprocess.run(["git", "apply", "-p2", only, str(upstream)], cwd=overlay, check=True)
    assert "legacy_load_mm_data(" in changed.read_text(encoding="utf-8")
    if is_fixed:
        subprocess.run(
            ["patch", "-p1", "-F0", "-i", str(ROOT / "deploy/slime/keep-input-ids.patch")], cwd=overlay, check=True
        )
    registry._jobs.clear()
    with (
        caplog.at_level(logging.WARNING),
        SglangProcess(checkpoint, tmp_path / "log", overlay=overlay) as patched,
        job_of(tmp_path, checkpoint, patched, fake_daemon, n_samples_per_prompt=4, global_batch_size=4) as job,
    ):
        samples = flatten(job.rollout().samples)
    reasons = [facts_of(sample).get("void") for sample in samples]
    assert ("PromptMismatch" in reasons) == (not is_fixed), reasons
    assert ("tokenises prompts with images again" in caplog.text) == (not is_fixed)
