"""A failed group is shown what worked before, in a member's place: with doubles of slime, and successes in memory."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from cuaenv.client import Evaluation
from tests.support.slime import IMAGE, Sample, ScriptedEngine, Tokenizer, rollout_metrics, stand_in_slime
from trainer.agent.types import Outcome, Reply, Trajectory, Turn
from trainer.replay.trajectory import StoredTrajectory, TokenRow
from trainer.rewards.facts import TurnFacts
from trainer.slime import job as registry
from trainer.slime import slime_compat
from trainer.slime.checks import warnings
from trainer.slime.config import SlimeConfig
from trainer.slime.hooks import data_source, keep_informative, normalize_rewards
from trainer.slime.play import replay
from trainer.slime.play.samples import facts_of, make_void, note, set_status
from trainer.tokens.rows import Row, Segment

IMAGE_ID = Tokenizer().convert_tokens_to_ids(IMAGE)
TASK = "fake/count-to-five"
START = "basis//prompt"


@pytest.fixture(autouse=True)
def _slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_jobs", {})
    with stand_in_slime(ScriptedEngine(lambda prompt: "")):
        yield


def args_of(**envd: Any) -> SimpleNamespace:
    replay_on = {"replay": {"seed": 1}}
    return SimpleNamespace(
        envd={"hosts": ["h:1"], **replay_on, **envd}, advantage_estimator="grpo", rewards_normalization=True
    )


def picture() -> Image.Image:
    return Image.new("RGB", (64, 32), "red")


def png() -> str:
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def token_row(*, images: int = 1) -> TokenRow:
    # 64x32 pixels are two tokens.
    return TokenRow(
        tokens=(9, *(IMAGE_ID,) * 2 * images, 11, 12),
        response_length=2,
        loss_mask=(1, 1),
        log_probs=(-0.25, -0.5),
        images=tuple(range(images)),
    )


def success(*rows: TokenRow, task_id: str = TASK, images: int = 1, start: str = START) -> StoredTrajectory:
    return StoredTrajectory(
        task_id=task_id,
        start=start,
        messages=({"role": "assistant", "content": "done"},),
        images=(png(),) * images,
        metadata={"reward_total": 0.9, "weight_versions": [["3"]] * max(1, len(rows))},
        rows=rows or (token_row(),),
    )


def member(
    index: int, score: float | None, *, rollout_id: int | None = None, group_index: int = 0, start: str = START
) -> Sample:
    sample = Sample(group_index=group_index, index=index, rollout_id=rollout_id, metadata={"task_id": TASK})
    if score is None:
        make_void(sample, SimpleNamespace(), status="FAILED", reason="MachineLost")
        return sample
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 2], 1, [1], [-1.0]
    sample.reward = score / 2
    set_status(sample, "COMPLETED")
    facts = {
        "task_id": TASK,
        "start": start,
        "task_score": score,
        "reason": "done",
        "turns": 1,
        "shared_turns": 0,
        "rows": 1,
        "reply_tokens": 1,
    }
    note(sample, {**facts, "parsed": 1, "fallbacks": 0, "timings_s": {}, "reward_parts": {}}, raw_reward=score)
    return sample


def pool(args: Any) -> Any:
    found = registry.job_of(args).pool
    assert found is not None
    return found


def test_a_failed_group_keeps_its_size_and_its_last_member_becomes_a_success() -> None:
    args = args_of()
    pool(args).add(success())
    group = [member(index, 0.2) for index in range(4)]
    others = [id(sample) for sample in group[:3]]
    assert keep_informative(args, group).keep
    assert [id(sample) for sample in group[:3]] == others
    assert len(group) == 4
    shown = group[3]
    assert (shown.tokens, shown.response_length, shown.loss_mask) == ([9, IMAGE_ID, IMAGE_ID, 11, 12], 2, [1, 1])
    assert shown.rollout_log_probs == [-0.25, -0.5], "those of the policy that sampled it, never made up"
    assert (shown.reward, shown.status.name, shown.weight_versions) == (0.9, "COMPLETED", ["3"])
    assert facts_of(shown)["replay"] == "behaviour_log_probs"
    raw, normal = normalize_rewards(args, group)
    assert raw == [0.1, 0.1, 0.1, 0.9]
    assert normal[3] > 0 > normal[0]
    assert shown.multimodal_train_inputs is not None
    assert list(shown.multimodal_train_inputs["image_grid_thw"]) == [(1, 2, 4)]
    assert set(shown.metadata) == {"task_id", "envd", "raw_reward"}, "no screenshots travel with the sample"


def test_a_void_member_is_replaced_first() -> None:
    args = args_of()
    pool(args).add(success())
    group = [member(0, 0.0), member(1, None), member(2, 0.0)]
    keep_informative(args, group)
    assert ["replay" in facts_of(sample) for sample in group] == [False, True, False]
    assert not group[1].remove_sample


@pytest.mark.parametrize(
    ("scores", "stored", "starts"),
    [
        ([0.0, 1.0], START, [START, START]),
        ([0.0, 0.5], START, [START, START]),
        ([None, None], START, [START, START]),
        ([0.0, 0.0], "basis/chk_1/prompt", [START, START]),
        ([0.0, 0.0], "other//prompt", [START, START]),
        ([0.0, 0.0], "basis//other", [START, START]),
        ([0.0, 0.0], "", [START, START]),
        ([0.0, 0.0], START, [START, "other//prompt"]),
        ([0.0, 0.0], "", ["", ""]),
    ],
    ids=[
        *("solved", "half solved", "of an unknown task", "near the goal", "another definition of the task"),
        *("another prompt", "an unknown start", "two starts", "all of unknown starts"),
    ],
)
def test_a_group_gets_only_a_success_of_its_one_start_if_it_failed(
    scores: list[float | None], stored: str, starts: list[str]
) -> None:
    args = args_of()
    pool(args).add(success(start=stored))
    group = [member(index, score, start=start) for index, (score, start) in enumerate(zip(scores, starts, strict=True))]
    keep_informative(args, group)
    assert not any("replay" in facts_of(sample) for sample in group)


def test_the_raw_score_decides_instead_of_the_shaped_reward() -> None:
    args = args_of()
    pool(args).add(success())
    group = [member(0, 0.4), member(1, 0.4)]
    group[0].reward = 5.0
    keep_informative(args, group)
    assert "replay" in facts_of(group[1])


def test_without_replay_a_failed_group_is_dropped() -> None:
    args = args_of(replay={})
    group = [member(index, 0.0) for index in range(2)]
    verdict = keep_informative(args, group)
    assert (verdict.keep, verdict.reason) == (False, "zero_std_0.0")
    assert registry.job_of(args).pool is None


def test_a_member_of_several_rows_is_replaced_by_all_rows_of_a_success() -> None:
    args = args_of(pad_rows_to=3)
    pool(args).add(success(token_row(), token_row(images=2), images=2))
    group: list[Any] = [[member(0, 0.0, rollout_id=0)], [member(1, 0.0, rollout_id=1)]]
    keep_informative(args, group)
    rows = group[1]
    assert [len(row.tokens) for row in rows] == [5, 7, 2]
    assert {row.rollout_id for row in rows} == {1}
    assert [facts_of(row).get("void") for row in rows] == [None, None, "padding"]
    normalize_rewards(args, [row for member_rows in group for row in member_rows])
    assert [len(row.multimodal_train_inputs["image_grid_thw"]) for row in rows[:2]] == [1, 2]


def test_images_that_do_not_match_the_tokens_void_the_sample() -> None:
    args = args_of()
    broken = TokenRow(tokens=(9, 11, 12), response_length=2, loss_mask=(1, 1), log_probs=(0.0, 0.0), images=(0,))
    pool(args).add(success(broken))
    group = [member(index, 0.0) for index in range(2)]
    keep_informative(args, group)
    normalize_rewards(args, group)
    assert group[1].remove_sample
    assert facts_of(group[1])["void"] == "replay"


def test_metrics_do_not_count_replays_as_successes() -> None:
    args = args_of()
    pool(args).add(success())
    group = [member(index, 0.0) for index in range(4)]
    keep_informative(args, group)
    metrics = rollout_metrics(args, group)
    assert metrics["success_frac"] == 0.0
    assert metrics["zero_std_frac"] == 0.0, "but its group teaches something now"
    assert metrics["replayed"] == 1.0
    assert metrics["mixed_origin_frac"] == 0.0
    assert pool(args).statistics()["replay/injected_count"] == 1.0


def lived(
    score: float, *, start: str = START, shared_turn_count: int = 0
) -> tuple[Trajectory, list[Row], list[Sample]]:
    shared = picture()
    rows, samples = [], []
    for number in range(2):
        row = Row(Segment(text="", engine_ids=(9, IMAGE_ID), train_ids=(9, IMAGE_ID, IMAGE_ID), images=(shared,)))
        row.reply([11, 12], [-0.25, -0.5], text="x", extra={})
        rows.append(row)
        sample = Sample(index=number, tokens=[9, IMAGE_ID, IMAGE_ID, 11, 12], response_length=2, reward=0.9)
        sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [1, 1], [-0.25, -0.5], ["3"]
        note(sample, {"start": start, "is_paid": True})
        samples.append(sample)
    trajectory = Trajectory(
        task_id=TASK,
        instruction="Count.",
        outcome=Outcome.TERMINATED,
        turns=(Turn(reply=Reply(text="x"), actions=(), facts=TurnFacts(text="x", parsed=True), row=0),),
        evaluation=Evaluation(score=score, checks=(), timings_ms={}),
        shared_turn_count=shared_turn_count,
    )
    return trajectory, rows, samples


async def test_the_pool_keeps_successes_as_sampled_and_no_failures() -> None:
    args = args_of()
    await replay.keep_success(pool(args), *lived(0.4))
    assert len(pool(args)) == 0
    await replay.keep_success(pool(args), *lived(1.0))
    kept = pool(args).pick(TASK, START)
    assert kept.rows == (token_row(), token_row())
    assert len(kept.images) == 1, "a screenshot that rows share is kept once"
    assert (kept.reward, kept.metadata["reward_total"], kept.metadata["weight_versions"]) == (1.0, 0.9, [["3"], ["3"]])


async def test_the_pool_keeps_no_success_that_began_in_mid_episode_or_in_an_unknown_state() -> None:
    args = args_of()
    await replay.keep_success(pool(args), *lived(1.0, shared_turn_count=1))
    await replay.keep_success(pool(args), *lived(1.0, start=""))
    assert len(pool(args)) == 0


class Source:
    """What is used of slime's data source."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []

    def save(self, rollout_id: int) -> None:
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        self.calls.append(("load", rollout_id))


def test_the_pool_is_saved_and_resumed_with_slimes_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_compat, "data_source", lambda args: Source())
    args = args_of()
    args.save = args.load = str(tmp_path)
    source = data_source(args)
    pool(args).add(success())
    source.save(7)
    pool(args).add(success(token_row(images=2), images=2))
    source.save(8)
    before = pool(args)
    monkeypatch.setattr(registry, "_jobs", {})
    again = data_source(args)
    again.load(7)
    assert len(pool(args)) == 1
    again.load(8)
    assert pool(args) == before
    again.load(9)
    assert pool(args) == before, "a checkpoint without a pool leaves it as it is"
    assert again.calls == [("load", 7), ("load", 8), ("load", 9)]


def test_files_are_read_when_the_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slime_compat, "data_source", lambda args: Source())
    path = tmp_path / "replays.jsonl"
    known, unknown = success(), success(start="")
    path.write_text("".join(json.dumps(each.as_row()) + "\n" for each in (known, unknown)))
    args = args_of(replay={"files": [str(path)]})
    data_source(args)
    assert len(pool(args)) == 1
    assert pool(args).pick(TASK, START) == known
    assert "1 trajectories are never replayed" in caplog.text


def test_without_a_filter_the_normaliser_replays_a_success() -> None:
    args = args_of()
    args.dynamic_sampling_filter_path = None
    pool(args).add(success())
    failed = [member(index, 0.0) for index in range(3)]
    solved = [member(index, float(index == 3), group_index=1) for index in range(3, 6)]
    samples = [*failed, *solved]
    same = list(map(id, samples))
    raw, normal = normalize_rewards(args, samples)
    assert list(map(id, samples)) == same
    assert ["replay" in facts_of(sample) for sample in samples] == [False, False, True, False, False, False]
    assert raw[2] == 0.9
    assert normal[2] > 0 > normal[0]
    assert failed[2].multimodal_train_inputs is not None
    assert list(warnings(args, SlimeConfig.from_mapping(args.envd))) == []


def test_another_filter_or_rows_disable_replay_with_a_warning() -> None:
    rows = args_of(agent={"images_per_row": 4})
    rows.dynamic_sampling_filter_path = None
    other = args_of()
    other.dynamic_sampling_filter_path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    for args in (rows, other):
        pool(args).add(success())
        group = [member(index, 0.0) for index in range(2)]
        normalize_rewards(args, group)
        assert not any("replay" in facts_of(sample) for sample in group)
        assert "nothing is ever replayed" in " ".join(warnings(args, SlimeConfig.from_mapping(args.envd)))
