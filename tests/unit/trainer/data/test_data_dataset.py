"""Data sets: the better source wins, unusable trajectories are dropped and counted, a rebuild gives the same bytes."""

import base64
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from cuaenv.cli import terminal
from cuaenv.client import Click, Done, PressKeys
from trainer.agent.grammars import grammar
from trainer.cli.app import app
from trainer.config import InputError
from trainer.data.dataset import Dataset, join, statistics
from trainer.data.files import write_rows
from trainer.data.oracles import read_oracles
from trainer.data.sft import sft_row
from trainer.data.transcripts import transcript_of, unparsable_turns
from trainer.replay.reader import ReadResult
from trainer.replay.trajectory import StoredTrajectory

GRAMMAR = grammar("qwen3-vl")
CLICK, SAVE, DONE = (GRAMMAR.render([action]) for action in (Click(10, 20), PressKeys(["ctrl", "s"]), Done()))


def picture() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


PICTURE = picture()


def trajectory_of(task_id: str, *replies: str, images: int = 1, **metadata: object) -> StoredTrajectory:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "<image>Do it."}]
    for reply in replies or (CLICK, DONE):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Done."}]
    return StoredTrajectory(
        task_id=task_id, messages=tuple(messages[:-1]), images=(PICTURE,) * images, metadata={"os": "linux", **metadata}
    )


def masks_of(trajectory: StoredTrajectory, *masks: int) -> StoredTrajectory:
    """Return a trajectory with these masks of its replies."""
    given = iter(masks)
    messages = tuple(
        {**message, "step_loss_mask": next(given)} if message["role"] == "assistant" else message
        for message in trajectory.messages
    )
    return replace(trajectory, messages=messages)


def source(name: str, *trajectories: StoredTrajectory) -> tuple[str, ReadResult]:
    return name, ReadResult(trajectories=trajectories, failed_count=0, surplus_count=0, problems=())


def joined(*sources: tuple[str, ReadResult], share: float = 0.0) -> Dataset:
    return join(dict(sources), grammar=GRAMMAR, share=share)


def test_of_duplicates_which_may_differ_in_masks_the_one_of_the_better_source_is_kept() -> None:
    masked = masks_of(trajectory_of("a_chunk3"), 0, 0)
    dataset = joined(source("good", trajectory_of("a")), source("bad", masked, trajectory_of("b")))
    assert [(item.task_id, item.metadata["source"]) for item in dataset.items] == [("a", "good"), ("b", "bad")]
    assert statistics(dataset)["dropped"] == {"good": {}, "bad": {"duplicate": 1}}


def test_the_choice_between_duplicates_does_not_depend_on_the_order_of_lines() -> None:
    first, second = trajectory_of("a", suite="one"), trajectory_of("a", suite="two")
    assert joined(source("one", first, second)) == joined(source("one", second, first))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (trajectory_of("a", CLICK, "I click on it now."), "unreadable"),
        (trajectory_of("a", CLICK.replace("left_click", "left_clique"), DONE), "unreadable"),
        (trajectory_of("a", images=0), "wrong images"),
        (trajectory_of("a", images=2), "wrong images"),
    ],
)
def test_unusable_trajectories_are_dropped_and_counted(broken: StoredTrajectory, reason: str) -> None:
    dataset = joined(source("one", broken, trajectory_of("b")))
    assert [item.task_id for item in dataset.items] == ["b"]
    assert dataset.dropped["one"][reason] == 1


def test_each_platform_is_a_part() -> None:
    dataset = joined(
        source(
            "one",
            trajectory_of("a"),
            trajectory_of("b", os="Windows"),
            trajectory_of("c", os="", platform="ubuntu"),
            trajectory_of("d", os=""),
        )
    )
    assert {item.task_id: item.metadata["os"] for item in dataset.items} == {
        "a": "linux",
        "b": "windows",
        "c": "linux",
        "d": "unknown",
    }
    assert {key: len(items) for key, items in dataset.parts().items() if items} == {
        ("linux", "train"): 2,
        ("windows", "train"): 1,
        ("unknown", "train"): 1,
    }


def many() -> list[StoredTrajectory]:
    return [
        trajectory_of(
            f"task{number % 20}{f'_chunk{number // 20}' if number > 20 else ''}",
            CLICK,
            *[SAVE] * (number // 20),
            DONE,
            level=1 + number % 4,
            instruction=f"Task {number % 20}",
        )
        for number in range(60)
    ]


def test_no_task_is_in_both_splits_and_every_level_is_in_both() -> None:
    dataset = joined(source("one", *many()), share=0.2)
    bases = {
        name: {item.base_id for item in dataset.items if item.metadata["split"] == name}
        for name in ("train", "held_out")
    }
    assert bases["train"].isdisjoint(bases["held_out"])
    levels = statistics(dataset)["by_level"]
    assert set(levels["train"]) == set(levels["held_out"]) == {"1", "2", "3", "4"}
    assert statistics(dataset)["trajectories"] == 60


def write_jsonl(path: Path, trajectories: list[StoredTrajectory]) -> Path:
    path.write_text("".join(json.dumps(each.as_row()) + "\n" for each in trajectories))
    return path


def test_a_rebuild_from_shuffled_files_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    runner, better, other = CliRunner(), many()[:30], many()[20:]
    for directory in (first, second):
        directory.mkdir()
        oracles = write_jsonl(directory / "oracles.jsonl", better)
        replays = write_jsonl(directory / "replays.jsonl", other)
        built = runner.invoke(
            app, ["data", "build", str(oracles), str(replays), "--out", str(directory / "out"), "--json"]
        )
        assert built.exit_code == 0, built.output
        exported = runner.invoke(
            app, ["data", "export-sft", str(oracles), "--out", str(directory / "out" / "sft.parquet")]
        )
        assert exported.exit_code == 0, exported.output
        random.Random(1).shuffle(better)
        random.Random(2).shuffle(other)
    written = {path.name: path.read_bytes() for path in (first / "out").iterdir()}
    assert set(written) == {"linux-train.jsonl", "linux-held_out.jsonl", "statistics.json", "sft.parquet"}
    assert written == {path.name: path.read_bytes() for path in (second / "out").iterdir()}
    assert json.loads(built.stdout)["dropped"] == {"oracles": {}, "replays": {"duplicate": 10}}


def test_a_rebuild_without_held_out_tasks_removes_their_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "some.jsonl", many())
    command = ["data", "build", str(path), "--out", str(tmp_path / "out")]
    for options, splits in ([], ["held_out", "train"]), (["--held-out", "0"], ["train"]):
        assert CliRunner().invoke(app, [*command, *options]).exit_code == 0
        assert sorted(file.name for file in (tmp_path / "out").glob("*.jsonl")) == [
            f"linux-{name}.jsonl" for name in splits
        ]


def test_statistics_count_what_build_would_drop(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "some.jsonl", [trajectory_of("a"), trajectory_of("a"), trajectory_of("b", "prose")])
    path.write_text(path.read_text() + "{broken\n")
    result = CliRunner().invoke(app, ["data", "stats", str(path), "--json"])
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert counts["dropped"] == {"some": {"duplicate": 1, "malformed": 1, "unreadable": 1}}
    assert counts["replies"] == {"least": 2, "mean": 2.0, "most": 2}


# --- conversations and rows for the supervised loss


def test_a_row_that_cannot_be_exported_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text(json.dumps(trajectory_of("a", images=0).as_row()) + "\n")
    failed = CliRunner().invoke(app, ["data", "export-sft", str(file), "--out", str(tmp_path / "sft.jsonl")])
    assert failed.exit_code == terminal.EXIT_FAILED
    assert "error: the messages have more placeholders than images" in failed.stderr
    assert not (tmp_path / "sft.jsonl").exists()


def test_parts_and_placeholders_are_equivalent() -> None:
    uri = f"data:image/png;base64,{PICTURE}"
    parts = StoredTrajectory(
        task_id="a",
        messages=(
            {"role": "user", "content": [{"type": "image", "image": uri}, {"type": "text", "text": "Do it."}]},
            {"role": "user", "content": [{"type": "image"}]},
        ),
        images=(PICTURE,),
    )
    transcript = transcript_of(parts)
    assert [turn["content"] for turn in transcript.messages] == ["<image>Do it.", "<image>"]
    assert transcript.images == (uri, uri)


@pytest.mark.parametrize(
    ("content", "images", "complaint"),
    [
        ("<image><image>", (PICTURE,), "more placeholders than images"),
        ("none", (PICTURE,), "1 of 1 images have no placeholder"),
        ([{"type": "text", "text": "the tag <image>"}], (), "images need parts of their own"),
        ([{"type": "video"}], (), "neither text nor image"),
        ("<image>", (base64.b64encode(b"GIF89a").decode(),), "not a PNG, JPEG or WebP"),
    ],
)
def test_images_that_do_not_match_their_placeholders_are_refused(
    content: Any, images: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        transcript_of(StoredTrajectory(task_id="a", messages=({"role": "user", "content": content},), images=images))


def marks(row: dict[str, Any] | None) -> list[int]:
    assert row is not None
    return [message["step_loss_mask"] for message in row["messages"] if message["role"] == "assistant"]


def test_only_the_models_turns_are_trained_unless_they_are_masked_and_each_message_is_marked() -> None:
    row = sft_row(masks_of(trajectory_of("a", CLICK, SAVE, DONE), 1, 0, 1))
    assert row is not None
    assert [(message["role"], message["step_loss_mask"]) for message in row["messages"]] == [
        *[("user", 0), ("assistant", 1)],
        *[("user", 0), ("assistant", 0)],
        *[("user", 0), ("assistant", 1)],
    ]


def test_unparsable_and_early_turns_are_shown_and_not_trained() -> None:
    trajectory = trajectory_of("a", CLICK, "prose", SAVE, DONE)
    assert marks(sft_row(trajectory, grammar=GRAMMAR)) == [1, 0, 1, 1]
    assert marks(sft_row(trajectory, grammar=GRAMMAR, last_turns=2)) == [0, 0, 1, 1]
    assert marks(sft_row(trajectory)) == [1, 1, 1, 1]


def test_a_trajectory_without_trained_turns_has_no_row() -> None:
    assert sft_row(trajectory_of("a", "prose"), grammar=GRAMMAR) is None


def test_unparsable_turns_are_reported_with_the_reason() -> None:
    problems = unparsable_turns(transcript_of(trajectory_of("a", CLICK, "prose")), GRAMMAR)
    assert list(problems) == [3]
    assert problems[3]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_written_rows_are_read_back_unchanged(tmp_path: Path, suffix: str) -> None:
    rows = [row for row in (sft_row(each) for each in many()[:5]) if row is not None]
    path = tmp_path / "new" / f"sft{suffix}"
    write_rows(path, rows)
    if suffix == ".parquet":
        read = pq.read_table(path).to_pylist()
    else:
        read = [json.loads(line) for line in path.read_text().splitlines()]
    assert read == rows


def test_an_unknown_file_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sft\.csv: unknown format; use a name that ends in \.jsonl or \.parquet"):
        write_rows(tmp_path / "sft.csv", [])


def test_two_sources_with_the_same_name_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [trajectory_of("a")])
    result = CliRunner().invoke(app, ["data", "stats", str(path), str(path)])
    assert result.exit_code == 2
    assert "two files have the same name" in result.output


@pytest.mark.parametrize(
    "line", ['{"task_id": "a"}', '{"task_id": "a", "steps": [[{"fly": 1}]]}', "[]", '{"task_id": "a", "steps": [[{}]]}']
)
def test_an_invalid_oracle_is_reported_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "oracles.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(InputError, match=r"line 2.*envd tasks oracles"):
        read_oracles(path)
