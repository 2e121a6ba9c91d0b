"""Rows of sampled trajectories as a table, and the turns of a row."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.gateway import picture_url
from tests.support.slime import IMAGE, Processor, Tokenizer
from trainer.cli.app import app
from trainer.data.token_rows import slime_samples, table_rows, turns_of
from trainer.replay.trajectory import StoredTrajectory, TokenRow, canonical
from trainer.tokens.chat import Chat

IMAGE_ID = Tokenizer().convert_tokens_to_ids(IMAGE)
ROW = TokenRow(
    tokens=(9, *[IMAGE_ID] * 4, 8, 20, 21, 7, *[IMAGE_ID] * 4, 6, 22),
    response_length=9,
    loss_mask=(1, 1, 0, 0, 0, 0, 0, 0, 1),
    log_probs=(-0.1, -0.2, 0, 0, 0, 0, 0, 0, -0.3),
    images=(0, 1),
)
STORED = StoredTrajectory(
    task_id="a/b_chunk0",
    messages=({"role": "user", "content": "<image>"}, {"role": "assistant", "content": "x"}),
    images=(picture_url(1), picture_url(2)),
    reward=0.5,
    metadata={"session": "s", "weight_versions": [["v7", "default"]]},
    rows=(ROW,),
)


def test_a_row_has_a_turn_for_each_run_of_its_mask() -> None:
    pictures = [object(), object()]
    first, second = turns_of(ROW, ["v7", "default"], pictures, image_id=IMAGE_ID)  # type: ignore[arg-type]
    assert (first.input_ids, first.output_ids) == (ROW.tokens[:6], (20, 21))
    assert (first.log_probs, first.versions, len(first.images)) == ((-0.1, -0.2), (7, 7), 1)
    assert (second.input_ids, second.output_ids) == (ROW.tokens[:14], (22,))
    assert (second.log_probs, second.versions, len(second.images)) == ((-0.3,), (0,), 2)


def test_the_table_has_a_line_for_each_row() -> None:
    (line,) = table_rows([STORED])
    assert line["tokens"] == list(ROW.tokens)
    assert line["weight_versions"] == ["v7", "default"]
    assert [image["bytes"][:4] for image in line["images"]] == [b"\x89PNG"] * 2


def test_rows_of_one_session_are_one_rollout_of_slime() -> None:
    chat = Chat(Tokenizer(), Processor())
    samples = slime_samples([STORED, STORED], chat)
    assert [(sample["index"], sample["rollout_id"]) for sample in samples] == [(0, 0), (1, 0)]
    assert samples[0]["response"] == chat.decode(ROW.tokens[-9:])
    assert samples[0]["rollout_log_probs"] == list(ROW.log_probs)


def test_the_command_writes_a_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source, out = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    source.write_text(canonical(STORED.as_row()) + "\n")
    done = CliRunner().invoke(app, ["data", "export-rows", str(source), "--out", str(out)])
    assert done.exit_code == 0, done.output
    (line,) = parquet.read_table(out).to_pylist()
    assert (line["reward"], line["loss_mask"]) == (0.5, list(ROW.loss_mask))
    done = CliRunner().invoke(app, ["data", "export-rows", str(source), "--out", str(tmp_path / "rows.pt")])
    assert done.exit_code == 2
    assert "--checkpoint" in done.output
