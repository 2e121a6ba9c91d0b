"""Demonstrations and preferences as Parquet."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from cuaenv.cli import terminal
from trainer.cli.app import app
from trainer.replay.trajectory import StoredTrajectory


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def played(task_id: str, *turns: tuple[str, str], reward: float, first: str = "red") -> StoredTrajectory:
    """Return an episode: the colour of the screen that each reply led to."""
    messages = [{"role": "system", "content": "You act."}, {"role": "user", "content": "<image>Task: do it."}]
    for reply, _ in turns:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Done.<image>"}]
    pictures = [png(colour) for colour in (first, *(colour for _, colour in turns[:-1]))]
    images = tuple(f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in pictures)
    return StoredTrajectory(task_id=task_id, messages=tuple(messages[:-1]), images=images, reward=reward)


WON = played("a", ("open", "blue"), ("save", "green"), ("done", ""), reward=1.0)
LOST = played("a", ("open", "blue"), ("quit", "grey"), ("done", ""), reward=0.0)
LOST_EARLIER = played("a", ("wait", "red"), ("done", ""), reward=-0.1)
ELSEWHERE = played("a", ("quit", ""), reward=0.0, first="white")
OTHER_TASK = played("b", ("quit", ""), reward=0.0)


def export(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write a table; return its features and rows."""
    source = tmp_path / "episodes.jsonl"
    episodes = (LOST_EARLIER, WON, LOST, ELSEWHERE, OTHER_TASK)
    source.write_text("".join(json.dumps(each.as_row()) + "\n" for each in episodes))
    file = tmp_path / "table.parquet"
    done = CliRunner().invoke(app, ["data", "export-parquet", str(source), "--out", str(file), *words])
    assert done.exit_code == 0, done.output
    table = pq.read_table(file)
    return json.loads(table.schema.metadata[b"huggingface"])["info"]["features"], table.to_pylist()


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_successes_are_demonstrations_with_their_images_as_bytes(tmp_path: Path) -> None:
    features, [row] = export(tmp_path)
    assert features.keys() == row.keys() == {"messages", "images", "task_id", "reward"}
    assert [message["role"] for message in row["messages"]] == ["system", *["user", "assistant"] * 3]
    assert row["messages"][1]["content"] == [{"type": "image", "text": None}, text("Task: do it.")]
    assert [image["bytes"] for image in row["images"]] == [png("red"), png("blue"), png("green")]
    assert (row["task_id"], row["reward"]) == ("a", 1.0)


def test_a_preference_is_the_state_in_which_a_success_and_a_failure_part(tmp_path: Path) -> None:
    features, rows = export(tmp_path, "--preferences")
    assert features.keys() == {"prompt", "chosen", "rejected", "images", "task_id", "chosen_reward", "rejected_reward"}
    by_reply = {row["rejected"][0]["content"][0]["text"]: row for row in rows}
    assert by_reply.keys() == {"quit", "wait"}, "ELSEWHERE began in another state, and OTHER_TASK has no success"
    later, earlier = by_reply["quit"], by_reply["wait"]
    assert later["chosen"] == [{"role": "assistant", "content": [text("save")]}]
    assert [image["bytes"] for image in later["images"]] == [png("red"), png("blue")]
    assert [message["role"] for message in later["prompt"]] == ["system", "user", "assistant", "user"]
    assert earlier["chosen"] == [{"role": "assistant", "content": [text("open")]}]
    assert [image["bytes"] for image in earlier["images"]] == [png("red")]
    assert (earlier["chosen_reward"], earlier["rejected_reward"]) == (1.0, -0.1)


def test_an_empty_table_keeps_its_columns(tmp_path: Path) -> None:
    features, rows = export(tmp_path, "--success-at", "2")
    assert (len(features), rows) == (4, [])


@pytest.mark.parametrize("name", ["table.jsonl", "table"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "episodes.jsonl"
    source.write_text(json.dumps(WON.as_row()) + "\n")
    done = CliRunner().invoke(app, ["data", "export-parquet", str(source), "--out", str(tmp_path / name)])
    assert done.exit_code == terminal.EXIT_FAILED
    assert "use a name that ends in .parquet" in done.output
    assert not (tmp_path / name).exists()
