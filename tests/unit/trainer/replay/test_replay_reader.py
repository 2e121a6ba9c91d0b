"""Reading stored trajectories: the same counts as a second implementation, and a report for every malformed line."""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import InputError
from trainer.replay.reader import read_jsonl
from trainer.replay.trajectory import StoredTrajectory, TokenRow, base_id, image_bytes

PNG = base64.b64encode(b"\x89PNG pixels").decode()
MESSAGES = [{"role": "user", "content": "<image>Do it."}, {"role": "assistant", "content": "Done."}]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def count_by_task(path: Path) -> dict[str, int]:
    """Return the counts by task, implemented a second time."""
    counts: dict[str, int] = {}
    for line in path.read_text().splitlines():
        if line.strip():
            row = json.loads(line)
            task = (
                row["metadata"]["task_id"]
                if "task_id" in row.get("metadata", {})
                else row.get("id", row.get("task_id"))
            )
            if row.get("reward", 1.0) >= 0.5 and counts.get(task, 0) < 10:
                counts[task] = counts.get(task, 0) + 1
    return counts


def test_counts_agree_with_a_second_implementation(tmp_path: Path) -> None:
    chance = random.Random(3)
    rows = []
    for _ in range(600):
        task = f"task{chance.randrange(12)}" + chance.choice(["", "_chunk0", "_chunk1"])
        row: dict[str, Any] = {chance.choice(["messages", "conversations"]): MESSAGES, "images": [PNG]}
        row |= chance.choice([{"id": task}, {"task_id": task}, {"id": task, "task_id": "other"}])
        row |= chance.choice([{}, {"metadata": {"task_id": task}}, {"metadata": {"source": "x"}}])
        row |= chance.choice([{}, {"reward": chance.choice([0.0, 0.49, 0.5, 1.0])}])
        rows.append(row)
    path = write(tmp_path / "replay.jsonl", *rows, "", "   ")
    result = read_jsonl(path)
    counts: dict[str, int] = {}
    for trajectory in result.trajectories:
        counts[trajectory.task_id] = counts.get(trajectory.task_id, 0) + 1
    assert counts == count_by_task(path)
    assert len(result.trajectories) + result.failed_count + result.surplus_count == 600
    assert result.problems == ()
    assert max(counts.values()) == 10


def test_the_task_id_is_that_of_the_metadata_else_id_else_task_id(tmp_path: Path) -> None:
    rows: list[Mapping[str, object]] = [
        {"metadata": {"task_id": "a"}, "id": "b", "task_id": "c", "messages": MESSAGES},
        {"metadata": {}, "id": "b", "task_id": "c", "messages": MESSAGES},
        {"task_id": "c", "messages": MESSAGES},
    ]
    assert [StoredTrajectory.from_row(row).task_id for row in rows] == ["a", "b", "c"]


def test_a_row_without_reward_is_a_demonstration() -> None:
    assert StoredTrajectory.from_row({"id": "a", "messages": MESSAGES}).reward == 1.0


def test_conversations_in_sharegpts_form_are_read() -> None:
    row = {"id": "a", "conversations": [{"from": "human", "value": "Do it."}, {"from": "gpt", "value": "Done."}]}
    read = StoredTrajectory.from_row(row).messages
    assert read == ({"role": "user", "content": "Do it."}, {"role": "assistant", "content": "Done."})


@pytest.mark.parametrize("image", [PNG, f"data:image/png;base64,{PNG}"])
def test_images_are_base64_or_data_uris(image: str) -> None:
    assert image_bytes(StoredTrajectory.from_row({"id": "a", "messages": MESSAGES, "images": [image]}).images[0]) == (
        b"\x89PNG pixels"
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[]", "a row must be a JSON object, not list"),
        ("null", "a row must be a JSON object, not NoneType"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "task_id: must be a text"),
        ('{"id": 7, "messages": [{"role": "user", "content": "x"}]}', 'task_id: must be a text; write "7"'),
        ('{"id": "a"}', "messages: must be a list"),
        ('{"id": "a", "messages": "x"}', "messages: must be a list"),
        ('{"id": "a", "messages": ["x"]}', "messages.0: a message must be a JSON object"),
        (
            '{"id": "a", "messages": [{"role": "wizard", "content": "x"}]}',
            "messages.0: role 'wizard' is not one of system",
        ),
        ('{"id": "a", "messages": [{"role": "user", "content": null}]}', "messages.0: content is a NoneType"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}], "reward": "1"}', "reward: must be a valid"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}], "reward": NaN}', "reward: must be a finite"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}], "reward": null}', "reward: must be a valid"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}], "images": ["!"]}', "an image is not base64"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}], "images": ["http://x,y"]}', "must be base64"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}], "images": "AAAA"}', "images: must be"),
        (
            '{"id": "a", "messages": [{"role": "user", "content": "x"}], "rows": [{"tokens": [1]}]}',
            "rows.0.response_length",
        ),
        ("[" * 100_000, "recursion"),
        ("\udcff", "codec can't decode"),
    ],
)
def test_a_malformed_line_is_reported_and_the_others_are_read(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "replay.jsonl"
    good = json.dumps({"id": "a", "messages": MESSAGES}).encode()
    path.write_bytes(good + b"\n" + line.encode(errors="surrogateescape") + b"\n" + good)
    result = read_jsonl(path)
    assert len(result.trajectories) == 2
    [problem] = result.problems
    assert problem.startswith("line 2: ")
    assert complaint in problem


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("task_id", "base"),
    [("a", "a"), ("a_chunk0", "a"), ("a_chunk0_chunk12", "a_chunk0"), ("_chunk", ""), ("chunk_a", "chunk_a")],
)
def test_a_chunk_belongs_to_its_base_task(task_id: str, base: str) -> None:
    assert base_id(task_id) == base


@given(
    reward=st.floats(0, 1),
    texts=st.lists(st.text(), min_size=1, max_size=3),
    count=st.integers(1, 5),
    prompt=st.integers(1, 5),
)
def test_a_written_trajectory_is_read_back_unchanged(reward: float, texts: list[str], count: int, prompt: int) -> None:
    trajectory = StoredTrajectory(
        task_id="a",
        messages=tuple({"role": "user", "content": text} for text in texts),
        images=(PNG,),
        reward=reward,
        metadata={"level": 1},
        rows=(
            TokenRow(
                tokens=tuple(range(prompt + count)),
                response_length=count,
                loss_mask=(1,) * count,
                log_probs=(-0.1234567890123456,) * count,
                images=(0,),
            ),
        ),
    )
    assert StoredTrajectory.from_row(json.loads(json.dumps(trajectory.as_row()))) == trajectory


@pytest.mark.parametrize(
    ("tokens", "response_length", "mask", "log_probs"),
    [((1, 2), 2, (1, 1), (0.0, 0.0)), ((1, 2), 1, (1, 1), (0.0,)), ((1, 2), 1, (1,), ()), ((1, 2), 0, (), ())],
)
def test_tokens_without_log_probabilities_are_refused(
    tokens: tuple[int, ...], response_length: int, mask: tuple[int, ...], log_probs: tuple[float, ...]
) -> None:
    with pytest.raises(InputError, match="log-probabilities"):
        TokenRow(tokens=tokens, response_length=response_length, loss_mask=mask, log_probs=log_probs)


def test_the_digest_of_messages_does_not_depend_on_the_order_of_keys() -> None:
    one = StoredTrajectory(task_id="a", messages=({"role": "user", "content": "x"},))
    other = StoredTrajectory(task_id="b", messages=({"content": "x", "role": "user"},))
    assert one.messages_sha1 == other.messages_sha1
    assert one.digest != other.digest
