"""slime's samples: reset, void, rows, records and task ids."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.slime import Sample
from trainer.agent.turns import History
from trainer.agent.types import Message, Reply
from trainer.config import InputError
from trainer.slime.checks import start_of_row
from trainer.slime.config import SlimeConfig
from trainer.slime.hooks import load_buffer, record_sample
from trainer.slime.play.rollout import Partial
from trainer.slime.play.samples import by_rollout, facts_of, flatten, is_void, make_void, note, reset_sample, spread

BARE = SimpleNamespace()


def test_a_void_sample_has_every_column_that_a_batch_may_have() -> None:
    args = SimpleNamespace(rollout_top_p=0.9, use_rollout_routing_replay=True, num_layers=3, moe_router_topk=2)
    sample = make_void(Sample(index=0), args, status="FAILED", reason="MachineLost")
    assert sample.rollout_top_p_token_offsets == [0, 0]
    assert sample.rollout_routed_experts == [[[0, 1]] * 3]
    assert is_void(sample)
    bare = make_void(Sample(index=0), BARE, status="ABORTED", reason="aborted")
    assert bare.rollout_top_p_token_offsets is bare.rollout_routed_experts is None


def test_a_reset_sample_keeps_only_its_identity() -> None:
    sample = Sample(index=3, group_index=1, rollout_id=3, metadata={"task_id": "a/b"})
    new = Sample(index=3, group_index=1, rollout_id=3, metadata={"task_id": "a/b"})
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info={"weight_version": "1"}, text="x")
    sample.reward, sample.remove_sample, sample.non_generation_time = 1.0, True, 2.0
    sample.status = Sample.Status.FAILED
    note(sample, {"turns": 3}, raw_reward=0.5)
    reset_sample(sample)
    assert sample == new


def test_rows_share_a_rollout_id_and_no_mutable_state() -> None:
    first, second = spread(Sample(index=4, metadata={"task_id": "a/b"}), 2, 1, BARE)
    note(first, {"turns": 1})
    second.tokens.append(1)
    assert (first.rollout_id, second.rollout_id) == (4, 4)
    assert (first.tokens, dict(facts_of(second))) == ([], {})
    with pytest.raises(ValueError, match="a numbered sample has at least one row"):
        spread(Sample(), 2, 1, BARE)


def test_rows_are_grouped_by_rollout() -> None:
    rows = spread(Sample(index=4), 2, 1, BARE)
    alone = [Sample(index=5), Sample(index=6)]
    assert by_rollout(flatten([rows, *alone])) == [rows, [alone[0]], [alone[1]]]


def test_the_task_id_comes_from_metadata_or_label() -> None:
    config = SlimeConfig.from_mapping({"hosts": ["h:1"]})
    assert start_of_row({"task_id": "a/b"}, "c/d", config) == "a/b"
    assert start_of_row({}, "c/d", config) == start_of_row(None, "c/d", config) == "c/d"
    with pytest.raises(InputError, match="no task id; add task_id"):
        start_of_row({}, None, config)


async def test_samples_are_recorded_in_the_configured_directory(tmp_path: Path) -> None:
    args = SimpleNamespace(envd={"hosts": ["a:1"], "record_dir": str(tmp_path / "records")})
    sample = Sample(index=1, group_index=0, response="¡sí!", reward=1.0, status=Sample.Status.COMPLETED)
    note(sample, {"turns": 3})
    for index in (1, 2):
        sample.index = index
        await record_sample(args, sample, rollout_id=5)
    await record_sample(args, sample, evaluation=True)
    lines = [json.loads(line) for line in (tmp_path / "records/rollout-5.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 2]
    assert lines[0]["facts"] == {"turns": 3}
    assert lines[0]["response"] == "¡sí!"
    assert (tmp_path / "records/evaluation-none.jsonl").exists()


async def test_nothing_is_recorded_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await record_sample(SimpleNamespace(envd={"hosts": ["a:1"]}), Sample(index=1))
    assert not list(tmp_path.iterdir())


def test_aborted_groups_that_0_2_0_saved_are_read(tmp_path: Path) -> None:
    path = tmp_path / "partial" / "7.pickle"
    path.parent.mkdir()
    # A list with classes, as that release named them.
    path.write_bytes(b"(lctrainer.slime.partial\nPartial\nactrainer.agent.history\nHistory\na.")
    source = SimpleNamespace(buffer=[])
    load_buffer(source, str(tmp_path), 7)
    assert source.buffer == [Partial, History]


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        (
            ["Done.", (1, 2), (-0.1, -0.2), "stop", 0.5],
            Reply(text="Done.", token_ids=(1, 2), log_probs=(-0.1, -0.2), elapsed_s=0.5),
        ),
        (["user", ("Hello",)], Message("user", ("Hello",))),
    ],
)
def test_replies_and_messages_that_0_2_0_saved_are_complete(fields: list[object], value: Reply | Message) -> None:
    read = type(value).__new__(type(value))
    read.__setstate__(fields)
    assert read == value
    assert pickle.loads(pickle.dumps(read)) == value  # noqa: S301 -- of this test
