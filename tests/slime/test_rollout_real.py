"""slime's rollout code with our hooks, a tiny real model and a served daemon: from prompts to train data."""

import itertools
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Action, Click, Done, EnvClient
from tests.support.sglang import SglangServer
from tests.support.slime_job import SlimeJob, check_sample, check_train_data, counting_job, log_prob_gaps
from trainer.agent.grammars import grammar
from trainer.learn.slime_job import write_tasks
from trainer.slime.config import Halted
from trainer.slime.hooks import log_rollout
from trainer.slime.play.rollout import partial_of
from trainer.slime.play.samples import facts_of, flatten, is_void

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

TASK = "fake/count-to-five"
SAY = grammar("qwen3-vl").render
#: Small screens are cheap for a CPU.
AGENT = {
    "max_turns": 5,
    "image_max_pixels": 65_536,
    "reply_tokens": 96,
    "prompt_tokens": 4096,
    "context_tokens": 8192,
    "timeout_s": 900.0,
}


def counting(prompt: str) -> str | None:
    """Solve the task from the third reply on; earlier replies are sampled."""
    reply_count = prompt.count("<|im_start|>assistant\n")
    return {3: SAY([Click(640, 125, count=3), Click(640, 125, count=2)]), 4: SAY([Done()])}.get(reply_count)


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[SglangServer]:
    with SglangServer(checkpoint, script=counting) as server:
        yield server


@pytest.fixture
def job_of(checkpoint: Path, engine: SglangServer, fake_daemon: str, tmp_path: Path) -> Iterator[Any]:
    jobs = ExitStack()

    def make(*, envd: dict[str, Any] | None = None, agent: dict[str, Any] | None = None, **changed: Any) -> SlimeJob:
        mapping = {
            "hosts": [fake_daemon],
            "engine_timeout_s": 60.0,
            **(envd or {}),
            "agent": {**AGENT, **(agent or {})},
        }
        job = counting_job(mapping, checkpoint, tmp_path, engine=(engine.host, engine.port), **changed)
        return jobs.enter_context(job)

    with jobs:
        yield make


def test_a_synchronous_rollout_becomes_train_data(job_of: Any) -> None:
    job = job_of(n_samples_per_prompt=2, rollout_batch_size=2, over_sampling_batch_size=2)
    output = job.rollout()
    data = check_train_data(job, output.samples)
    samples: list[Any] = flatten(output.samples)
    assert [sample.status.name for sample in samples] == ["COMPLETED"] * 4
    for group in output.samples:
        assert len({facts_of(sample)["origin"] for sample in flatten([group])} - {""}) == 1, "they start in one state"
    assert [facts_of(sample)["task_score"] for sample in samples] == [1.0] * 4
    assert data["raw_reward"] == [1.0] * 4
    for sample in samples:
        begins = [event for event in sample.trace["events"] if event["type"] == "span_start"]
        # The first rollout of a job checks the engine's tokens by a request for one token.
        spans = Counter(each["name"] for each in begins if (each.get("attrs") or {}).get("max_new_tokens") != 1)
        turns = facts_of(sample)["turns"]
        assert (spans["env_reset"], spans["env_evaluate"], spans["sglang_generate"]) == (1, 1, turns)
        assert spans["env_step"] >= 2


def test_members_of_a_tree_share_a_prefix_that_is_trained_once(job_of: Any, engine: SglangServer) -> None:
    tree = {"group": "tree", "branch_every": 2, "branch_ways": 3}
    job = job_of(envd=tree, n_samples_per_prompt=3, global_batch_size=3)
    samples = flatten(job.rollout().samples)
    check_train_data(job, [samples])
    # First replies are sampled, so two separate starts would differ.
    assert sorted(facts_of(sample)["shared_turns"] for sample in samples) == [0, 2, 2]
    said = [ids for sample in samples for ids, _ in sampled_turns(sample)]
    replies = [tuple(token[1] for token in answer) for answer in engine.answers]
    assert Counter(said) == Counter(replies), "each reply is trained once"
    first, *others = sorted(samples, key=lambda sample: facts_of(sample)["shared_turns"])
    for other in others:
        prompt_length = len(other.tokens) - other.response_length
        assert other.tokens[:prompt_length] == first.tokens[:prompt_length]


def test_slimes_abort_releases_every_machine(job_of: Any, fake_daemon: str) -> None:
    job = job_of(rollout_batch_size=1, over_sampling_batch_size=3)
    output = job.rollout()
    check_train_data(job, output.samples)
    with EnvClient(fake_daemon) as client:
        (pool,) = client.list_pools()
    assert pool.leased_count == 0


@pytest.mark.parametrize("is_masked", [False, True])
def test_aborted_samples_continue_in_later_rollouts(
    job_of: Any, engine: SglangServer, fake_daemon: str, is_masked: bool
) -> None:
    job = job_of(
        envd={"engine_timeout_s": 600.0},
        over_sampling_batch_size=2,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=is_masked,
        data_source_path="trainer.slime.hooks.data_source",
    )
    samples: list[Any] = []
    for number in range(3):
        output = job.rollout(number)
        check_train_data(job, output.samples)
        samples += flatten(output.samples)
    continued = [facts_of(sample)["continued_turns"] for sample in samples]
    assert any(continued), "slime aborted none that had a turn"
    assert any(any(sample.loss_mask) for sample in samples if facts_of(sample)["continued_turns"])
    assert [sample.reward for sample in samples] == [1.0] * len(samples)
    said = Counter(ids for sample in samples for ids, _ in sampled_turns(sample))
    replies = Counter(tuple(token[1] for token in answer) for answer in engine.answers)
    assert said <= replies, "trained tokens are sampled ones, and none is trained twice"
    for sample in samples:
        facts, trained = facts_of(sample), len(list(sampled_turns(sample)))
        assert trained or is_masked
        # slime itself masks a sample that was complete before.
        assert trained in (0, facts["turns"] - is_masked * facts["continued_turns"])
    with EnvClient(fake_daemon) as client:
        (pool,) = client.list_pools()
        waiting = [partial_of(sample) for group in job.data_source.buffer for sample in group]
        kept = {each.checkpoint.checkpoint_id for each in waiting if each is not None}
        assert kept <= {each.checkpoint_id for each in client.list_checkpoints()}
    assert pool.leased_count == 0


def test_rows_of_one_episode_share_their_rollout(job_of: Any) -> None:
    job = job_of(envd={"pad_rows_to": 2}, agent={"images_per_row": 2, "images_kept": 1}, rollout_batch_size=2)
    output = job.rollout()
    data = check_train_data(job, output.samples)
    members = [member for group in output.samples for member in group]
    for rows in members:
        assert len(rows) % 2 == 0
        assert {row.rollout_id for row in rows} == {rows[0].index}
        assert len({row.reward for row in rows if not is_void(row)}) == 1
        trained = sum(sum(row.loss_mask) for row in rows)
        assert trained == facts_of(rows[0])["reply_tokens"]
    assert len(set(data["rollout_ids"])) == 4


def test_a_schedule_over_two_ranks_accepts_padded_rows(job_of: Any) -> None:
    from slime.utils.dp_schedule import build_dp_schedule

    job = job_of(
        envd={"pad_rows_to": 2},
        agent={"images_per_row": 2, "images_kept": 1},
        rollout_batch_size=2,
        use_dynamic_batch_size=False,
        global_batch_size=4,
    )
    data = job.train_data(job.rollout().samples)
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, *_ = build_dp_schedule(
        job.args,
        config,
        [len(tokens) for tokens in data["tokens"]],
        global_batch_size=4,
        rollout_indices=data["rollout_ids"],
    )
    assert sorted(itertools.chain(*partitions)) == list(range(len(data["tokens"])))


def test_the_fully_asynchronous_loop_uses_the_same_generate(job_of: Any) -> None:
    job = job_of(rollout_batch_size=2, sglang_server_concurrency=2)
    try:
        for rollout_id in range(2):
            groups = job.fully_async_rollout(rollout_id)
            check_train_data(job, groups)
            assert not any(is_void(sample) for sample in flatten(groups))
    finally:
        job.stop_fully_async()


def test_weight_updates_of_the_fully_asynchronous_loop_lose_no_episode(job_of: Any, engine: SglangServer) -> None:
    calls = itertools.count(1)

    def say(prompt: str) -> str | None:
        if next(calls) in (2, 6, 10):
            engine.abort_running()
        return counting(prompt)

    engine.script = say
    job = job_of(rollout_batch_size=2, sglang_server_concurrency=2)
    try:
        groups = job.fully_async_rollout()
        samples = flatten(groups)
    finally:
        job.stop_fully_async()
    check_train_data(job, groups)
    assert [sample.status.name for sample in samples] == ["COMPLETED"] * 4
    assert {facts_of(sample)["attempts"] for sample in samples} == {1}


def test_a_rollout_of_unknown_tasks_ends_the_job(job_of: Any, tmp_path: Path) -> None:
    job = job_of(
        envd={"max_lost_groups": 8, "halt": {"above": {}}},
        rollout_batch_size=2,
        over_sampling_batch_size=2,
        prompt_data=str(write_tasks(tmp_path / "unknown.jsonl", ["fake/no-such-task"] * 4)),
        dynamic_sampling_filter_path="trainer.slime.hooks.keep_informative",
    )
    with pytest.raises(Halted, match=r"consecutive groups were lost \(TaskNotFound \d+\); .*fake/no-such-task"):
        job.rollout()


def test_the_fully_asynchronous_loop_ends_the_job_when_it_logs(job_of: Any, tmp_path: Path) -> None:
    job = job_of(
        envd={"max_lost_groups": 2},
        rollout_batch_size=4,
        prompt_data=str(write_tasks(tmp_path / "unknown.jsonl", ["fake/no-such-task"] * 4)),
    )
    try:
        samples = flatten(job.fully_async_rollout())
    finally:
        job.stop_fully_async()
    assert {sample.status.name for sample in samples} == {"FAILED"}
    with pytest.raises(Halted, match="consecutive groups were lost"):
        log_rollout(0, job.args, samples, None, 1.0)


def by_luck(prompt: str) -> str | None:
    """Solve the task or end it at once, depending on the sampled first reply."""
    _, *replies = prompt.split("<|im_start|>assistant\n")
    plays = zlib.crc32(replies[0].partition("<|im_end|>")[0].encode()) % 2 == 0
    count: list[Action] = [Click(640, 125, count=3), Click(640, 125, count=2)]
    return {2: SAY(count if plays else [Done()]), 3: SAY([Done()])}.get(len(replies))


def test_slimes_loop_calls_our_filter_and_log_hooks(
    job_of: Any, engine: SglangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.observability import logging_utils, rollout_metrics

    logged: dict[str, Any] = {}
    monkeypatch.setattr(logging_utils, "log", lambda args, metrics, step_key: logged.update(metrics))
    engine.script = by_luck
    job = job_of(
        n_samples_per_prompt=4, global_batch_size=4, dynamic_sampling_filter_path="trainer.slime.hooks.keep_informative"
    )
    output = job.rollout()
    data = check_train_data(job, output.samples)
    assert set(data["raw_reward"]) == {0.0, 1.0}, "a group without signal is dropped"
    assert abs(sum(data["rewards"])) < 1e-6
    rollout_metrics.log_rollout_data(0, job.args, flatten(output.samples), output.metrics, 1.0)
    assert logged["envd/kept/zero_std_frac"] == 0.0
    assert logged["envd/kept/task_score"] == statistics.fmean(data["raw_reward"])
    assert logged["rollout/step"] == 0, "slime logs its own metrics as well"

    engine.prompt_token_error = 1
    job.args.eval_datasets = [eval_dataset(job)]
    output = job.evaluate()
    rollout_metrics.log_eval_rollout_data(0, job.args, output.data, output.metrics)
    assert logged["eval/held-out/envd/void_frac"] == 1.0
    assert "eval/held-out" not in logged, "a data set without valid samples is not scored"


def test_an_evaluation_returns_one_sample_per_episode(job_of: Any) -> None:
    job = job_of(agent={"images_per_row": 2, "images_kept": 1})
    job.args.eval_datasets = [eval_dataset(job)]
    result = job.evaluate().data["held-out"]
    assert result["rewards"] == [1.0] * 4
    for sample in result["samples"]:
        check_sample(sample, image_id=job.image_id)


def eval_dataset(job: SlimeJob) -> Any:
    from slime.utils.eval_config import EvalDatasetConfig

    return EvalDatasetConfig(
        name="held-out",
        path=job.args.prompt_data,
        input_key="prompt",
        metadata_key="metadata",
        n_samples_per_eval_prompt=1,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_response_len=96,
    )


def test_an_engine_that_read_another_prompt_voids_the_sample(job_of: Any, engine: SglangServer) -> None:
    engine.prompt_token_error = 1
    job = job_of()
    output = job.rollout()
    data = check_train_data(job, output.samples)
    samples = flatten(output.samples)
    assert [sample.status.name for sample in samples] == ["FAILED", "FAILED"]
    assert {facts_of(sample)["void"] for sample in samples} == {"PromptMismatch"}
    assert data["rewards"] == [0.0, 0.0]
    assert not any(map(any, data["loss_masks"]))


def test_an_engine_that_tokenises_prompts_again_causes_a_warning_and_voids(
    job_of: Any, engine: SglangServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine.tokenises_again, engine.script = True, None
    job = job_of()
    samples = flatten(job.rollout().samples)
    check_train_data(job, [samples])
    assert "PromptMismatch" in {facts_of(sample).get("void") for sample in samples}
    assert "it tokenises prompts with images again" in caplog.text


@pytest.mark.parametrize("group", ["fork", "tree"])
def test_top_p_sets_of_the_engine_become_columns(job_of: Any, group: str) -> None:
    job = job_of(envd={"group": group, "branch_every": 2}, rollout_top_p=0.9)
    samples = flatten(job.rollout().samples)
    data = check_train_data(job, [samples])
    assert not any(is_void(sample) for sample in samples)
    for ids, mask in zip(data["rollout_top_p_token_ids"], data["loss_masks"], strict=True):
        assert len(ids) == sum(mask), "one token in the set of each sampled token"


def test_an_engine_killed_mid_rollout_voids_its_samples(job_of: Any, engine: SglangServer) -> None:
    def say(prompt: str) -> str | None:
        engine.is_dead = len(engine.requests) >= 3
        return counting(prompt)

    engine.script = say
    job = job_of(envd={"engine_retries": 2})
    output = job.rollout()
    check_train_data(job, output.samples)
    assert {sample.status.name for sample in flatten(output.samples)} == {"FAILED"}


def test_200_turns_have_the_models_log_probabilities(job_of: Any, checkpoint: Path) -> None:
    """Trained rows, passed through the model again, have the engine's log-probabilities."""
    with SglangServer(checkpoint) as other:
        job = job_of(
            agent={"max_turns": 8, "reply_tokens": 24},
            rollout_batch_size=5,
            over_sampling_batch_size=5,
            n_samples_per_prompt=5,
            sglang_router_port=other.port,
        )
        samples = flatten(job.rollout().samples)
        replies = {tuple(token[1] for token in answer) for answer in other.answers}
        turns = list(itertools.chain.from_iterable(map(sampled_turns, samples)))
        assert len(turns) >= 200
        assert {ids for ids, _ in turns} <= replies, "ids are the engine's"
        gaps = [gap for sample in samples for gap in log_prob_gaps(sample, other)]
    mean, worst = statistics.fmean(gaps), max(gaps)
    print(f"\n{len(turns)} turns, {len(gaps)} tokens: mean gap {mean:.5f}, worst {worst:.5f}")
    assert mean < 0.02


def sampled_turns(sample: Any) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Yield the ids and log-probabilities of each run of trained tokens."""
    response = sample.tokens[-sample.response_length :]
    positions = range(sample.response_length)
    for trained, run in itertools.groupby(positions, key=lambda position: sample.loss_mask[position]):
        if trained:
            run_of = list(run)
            yield tuple(response[i] for i in run_of), tuple(sample.rollout_log_probs[i] for i in run_of)
