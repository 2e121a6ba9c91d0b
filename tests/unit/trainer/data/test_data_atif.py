"""Harbor's trajectory format: valid documents, our own read back unchanged, others played again or refused."""

import base64
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from cuaenv.cli import terminal
from cuaenv.client import Click, Done, Drag, Scroll, TypeText
from cuaenv.frames.size import fit
from trainer.agent.grammars import grammar
from trainer.agent.settings import AgentSettings
from trainer.cli.app import app
from trainer.data.atif import to_atif
from trainer.data.atif_actions import AtifError, _wheel, actions_of
from trainer.data.atif_import import from_atif
from trainer.replay.reader import read_jsonl
from trainer.replay.trajectory import StoredTrajectory, image_bytes

GRAMMAR = grammar("qwen3-vl")
CLICK, DONE = GRAMMAR.render([Click(500, 250)]), GRAMMAR.render([Done()])
#: The fields of version 1.7 that we write, by object.
FIELDS = {
    "root": {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"},
    "agent": {"name", "version", "tool_definitions", "extra"},
    "step": {"step_id", "source", "message", "tool_calls", "observation", "extra"},
    "call": {"tool_call_id", "function_name", "arguments"},
    "result": {"source_call_id", "content"},
}


def png(colour: str, size: tuple[int, int] = (64, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def trajectory() -> StoredTrajectory:
    return StoredTrajectory(
        task_id="desktop/note?seed=3",
        messages=(
            {"role": "system", "content": "You act."},
            {"role": "user", "content": "<image>Task: do it."},
            {"role": "assistant", "content": f"I click.\n{CLICK}"},
            {"role": "user", "content": "<image>Done."},
            {"role": "assistant", "content": "Hm.", "step_loss_mask": 0},
            {"role": "user", "content": "Nothing was done."},
            {"role": "assistant", "content": DONE},
        ),
        images=tuple(f"data:image/png;base64,{base64.b64encode(png(c)).decode()}" for c in ("red", "blue")),
        reward=0.5,
        metadata={"instruction": "do it.", "grammar": "qwen3-vl"},
    )


def check(document: Mapping[str, Any]) -> None:
    """Check what the format demands of a document."""
    assert document.keys() == FIELDS["root"]
    assert document["schema_version"] == "ATIF-v1.7"
    assert document["agent"].keys() == FIELDS["agent"]
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    for step in document["steps"]:
        assert step.keys() <= FIELDS["step"]
        assert step["source"] in {"system", "user", "agent"}
        calls = step.get("tool_calls", [])
        assert not calls or step["source"] == "agent"
        assert all(call.keys() == FIELDS["call"] for call in calls)
        results = step.get("observation", {"results": []})["results"]
        assert all(result.keys() <= FIELDS["result"] for result in results)
        ids = [call["tool_call_id"] for call in calls]
        assert {result["source_call_id"] for result in results if "source_call_id" in result} <= set(ids)
        for content in [step["message"], *(result["content"] for result in results)]:
            for part in [] if isinstance(content, str) else content:
                assert part.keys() == ({"type", "text"} if part["type"] == "text" else {"type", "source"})


def test_a_document_is_valid_and_has_actions_in_pixels_of_the_picture() -> None:
    document = to_atif(trajectory(), grammar=GRAMMAR)
    check(document.trajectory)
    system, user, click, mumble, done = document.trajectory["steps"]
    assert (system["source"], user["source"]) == ("system", "user")
    assert user["message"][0]["source"] == {"media_type": "image/png", "path": "images/0001.png"}
    assert [call["arguments"] for call in click["tool_calls"]] == [{"action": "click", "x": 32, "y": 8}]
    assert click["observation"]["results"][0]["source_call_id"] == click["tool_calls"][0]["tool_call_id"]
    assert ("tool_calls" in mumble, mumble["extra"]["step_loss_mask"]) == (False, 0)
    assert "tool_call" in mumble["extra"]["mistake"]
    assert [call["arguments"] for call in done["tool_calls"]] == [{"action": "done"}]
    assert document.images == {"images/0001.png": png("red"), "images/0002.png": png("blue")}
    assert document.trajectory["final_metrics"]["extra"]["reward"] == 0.5


def test_our_own_documents_are_read_back_unchanged(tmp_path: Path) -> None:
    before = tmp_path / "before.jsonl"
    before.write_text(json.dumps(trajectory().as_row()) + "\n")
    runner, directory, after = CliRunner(), tmp_path / "atif", tmp_path / "after.jsonl"
    exported = runner.invoke(app, ["data", "export-atif", str(before), "--out", str(directory)])
    assert exported.exit_code == 0, exported.output
    document = directory / "0001-desktop-note-seed-3" / "trajectory.json"
    check(json.loads(document.read_text()))
    imported = runner.invoke(app, ["data", "import-atif", str(document), "--out", str(after)])
    assert imported.exit_code == 0, imported.output
    assert read_jsonl(after).trajectories == (trajectory(),)


def foreign(folder: Path, *steps: Mapping[str, Any], **more: Any) -> Path:
    """Write a document of another agent, with two pictures."""
    (folder / "images").mkdir(exist_ok=True)
    for name, colour in (("first", "red"), ("second", "blue")):
        (folder / "images" / f"{name}.png").write_bytes(png(colour, (640, 320)))
    (folder / "images" / "small.png").write_bytes(png("red"))
    document = {
        "schema_version": "ATIF-v1.8",
        "session_id": "s-1",
        "agent": {"name": "other", "version": "2", "unknown": 1},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        **more,
    }
    path = folder / "trajectory.json"
    path.write_text(json.dumps(document))
    return path


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "text": None, "source": {"media_type": "image/png", "path": f"images/{name}.png"}}


def call(number: int, function: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_call_id": f"c{number}", "function_name": function, "arguments": arguments}


USER = {"source": "user", "message": [{"type": "text", "text": "Save the note."}, image("first")]}
CLICKED = {
    "source": "agent",
    "message": "I see the button.",
    "tool_calls": [call(1, "computer_action", type="click", x=320, y=80, button=None, source="native_prescaled")],
    "observation": {"results": [{"source_call_id": "c1", "content": [image("second")]}]},
}
COMPLETE = {
    "source": "agent",
    "message": "",
    "tool_calls": [call(2, "computer_action", type="done", result="ok"), call(3, "mark_task_complete", result="ok")],
}


def test_a_document_of_another_agent_becomes_a_demonstration_in_our_prompts(tmp_path: Path) -> None:
    read = from_atif(foreign(tmp_path, USER, CLICKED, COMPLETE), settings=AgentSettings())
    roles = [message["role"] for message in read.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert "Task: Save the note." in read.messages[1]["content"]
    thought, _, action = read.messages[2]["content"].partition("\n")
    assert (thought, action) == ("I see the button.", GRAMMAR.render([Click(501, 251)]))
    assert read.messages[4]["content"] == GRAMMAR.render([Done("ok")])
    assert (read.task_id, read.reward, len(read.images), read.metadata["source"]) == ("s-1", 1.0, 2, "atif:other")


def test_an_episode_that_did_not_end_keeps_its_last_action(tmp_path: Path) -> None:
    path = foreign(tmp_path, USER, CLICKED, extra={"task_id": "t", "reward": 0.25})
    read = from_atif(path, settings=AgentSettings(grammar="code"))
    assert (read.task_id, read.reward, read.messages[-1]["role"]) == ("t", 0.25, "assistant")
    assert "320, 80" in read.messages[-1]["content"]


def test_steps_that_were_copied_or_only_look_are_not_replies(tmp_path: Path) -> None:
    looking = {
        "source": "agent",
        "message": "",
        "tool_calls": [call(1, "computer_action", type="screenshot")],
        "observation": {"results": [{"content": [image("first")]}]},
    }
    path = foreign(
        tmp_path,
        {"source": "user", "message": "Go."},
        {**CLICKED, "is_copied_context": True},
        looking,
        CLICKED,
        COMPLETE,
    )
    read = from_atif(path, settings=AgentSettings())
    assert sum(message["role"] == "assistant" for message in read.messages) == 2


def test_the_first_picture_can_be_named(tmp_path: Path) -> None:
    path = foreign(tmp_path, {"source": "user", "message": "Go."}, CLICKED, COMPLETE)
    with pytest.raises(AtifError, match="step 2: no picture before it; name it by --first-picture"):
        from_atif(path, settings=AgentSettings())
    read = from_atif(path, settings=AgentSettings(), first_picture="images/first.png")
    assert len(read.images) == 2


def with_call(function: str, **arguments: Any) -> dict[str, Any]:
    return {**CLICKED, "tool_calls": [call(1, function, **arguments)]}


def with_picture(name: str) -> dict[str, Any]:
    return {**CLICKED, "observation": {"results": [{"content": [image(name)]}]}}


def with_scroll(**arguments: Any) -> dict[str, Any]:
    return with_call("computer_action", type="scroll", **{"x": 320, "y": 80, **arguments})


@pytest.mark.parametrize("name", ["pipe.png", "comments.png", "huge.png", "directory.png"])
def test_a_picture_that_would_take_long_is_refused(tmp_path: Path, name: str) -> None:
    path = foreign(tmp_path, with_image(f"images/{name}"), CLICKED)
    images = path.parent / "images"
    os.mkfifo(images / "pipe.png")
    (images / "comments.png").write_bytes(b"P3\n4000 4000\n255\n" + b"#\n" * 2_000_000)
    with (images / "huge.png").open("wb") as file:
        file.truncate(1 << 40)
    (images / "directory.png").mkdir()
    with pytest.raises(AtifError, match=f"image images/{name}: cannot be read"):
        from_atif(path, settings=AgentSettings())


@pytest.mark.parametrize("step", [
    with_scroll(scroll_y=10**400), with_scroll(scroll_x=-(10**400)), with_scroll(x=10**400, scroll_y=1),
    with_call("computer_action", type="wait", duration=10**400),
])  # fmt: skip
def test_a_number_that_no_float_holds_is_refused(tmp_path: Path, step: dict[str, Any]) -> None:
    with pytest.raises(AtifError, match=r"trajectory\.json"):
        from_atif(foreign(tmp_path, USER, step, COMPLETE), settings=AgentSettings())


@pytest.mark.parametrize(("pixels", "clicks"), [(0, 0), (1, 1), (-1, -1), (250, 2), (-250, -2), (2**53 + 1, 0)])
def test_a_scroll_is_clicks_of_100_pixels(pixels: int, clicks: int) -> None:
    assert _wheel(pixels) == (clicks or pixels // 100)


def test_a_document_that_is_a_pipe_or_directory_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path):
        with pytest.raises(AtifError, match=r"cannot be read: .*(is not a file|Is a directory)"):
            from_atif(path, settings=AgentSettings())


def with_image(path: str) -> dict[str, Any]:
    return {"source": "user", "message": [{"type": "image", "source": {"media_type": "image/png", "path": path}}]}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([USER, with_call("bash", command="ls")], "step 2: function bash: not one of computer, computer_action"),
        ([USER, with_call("computer_action", type="navigate", url="x")], "step 2: computer_action navigate: has no"),
        ([USER, with_call("computer_action", type="click", x=-1, y=2)], "step 2: click.x: -1 is outside"),
        ([USER, with_call("computer", action="warp")], "step 2: action: unknown action 'warp'"),
        ([USER, with_call("computer_action", type="key", keys="a")], "step 2: keys: 'a' is not a list"),
        ([USER, {"source": "agent", "message": "Hm."}, CLICKED], "step 2: a reply without an action"),
        ([USER], "0 steps act; it must be 1 to max_turns"),
        ([with_image("../secret.png"), CLICKED], "image ../secret.png: not in the document's directory"),
        ([with_image("https://127.0.0.1/x.png"), CLICKED], "not in the document's directory; copy it there"),
        ([with_image("images/none.png"), CLICKED], "image images/none.png: cannot be read"),
        ([with_image("trajectory.json"), CLICKED], "image trajectory.json: cannot be read"),
        ([], "steps: "),
        ([{"source": "agent"}], "steps.0.message: "),
        (
            [USER, with_call("computer_action", type="click", x=9999, y=2), COMPLETE],
            "step 2: (9999, 2) is outside its picture of 640x320",
        ),
        ([USER, with_picture("small"), COMPLETE], "step 2: a picture of another size"),
    ],
)
def test_what_cannot_be_a_demonstration_is_refused(tmp_path: Path, steps: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(AtifError) as caught:
        from_atif(foreign(tmp_path, *steps), settings=AgentSettings())
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": "ATIF-v2.0", "agent": {"name": "a"}, "steps": []}'])
def test_what_is_not_a_document_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(text)
    with pytest.raises(AtifError, match=str(path)):
        from_atif(path, settings=AgentSettings())


def test_limits_and_rewards_are_checked(tmp_path: Path) -> None:
    path = foreign(tmp_path, USER, CLICKED, COMPLETE)
    with pytest.raises(AtifError, match=r"2 steps act; it must be 1 to max_turns \(--agent\), 1"):
        from_atif(path, settings=AgentSettings(max_turns=1))
    path = foreign(tmp_path, USER, CLICKED, extra={"reward": "high"})
    with pytest.raises(AtifError, match=r"extra.reward: 'high' is not a number"):
        from_atif(path, settings=AgentSettings())


def test_pictures_are_scaled_as_the_agents_view_is(tmp_path: Path) -> None:
    path = foreign(tmp_path, USER, CLICKED, COMPLETE)
    for name in ("first", "second"):
        (tmp_path / f"images/{name}.png").write_bytes(png("red", (650, 340)))
    read = from_atif(path, settings=AgentSettings())
    with Image.open(io.BytesIO(image_bytes(read.images[0]))) as shown:
        assert shown.size == fit(650, 340, multiple_px=32) == (640, 352)
    with pytest.raises(AtifError, match="no image in steps of 32 px is within the limits"):
        from_atif(path, settings=AgentSettings(image_max_pixels=1000))


def test_a_truncated_picture_is_refused(tmp_path: Path) -> None:
    path = foreign(tmp_path, USER, CLICKED, COMPLETE)
    buffer = io.BytesIO()
    Image.effect_noise((640, 320), 50).save(buffer, "JPEG")
    (tmp_path / "images/first.png").write_bytes(buffer.getvalue()[:5000])
    with pytest.raises(AtifError, match=r"image images/first.png: cannot be read"):
        from_atif(path, settings=AgentSettings())


def test_a_refused_document_is_reported_and_the_others_are_written(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    paths = [foreign(bad, USER), foreign(good, USER, CLICKED, COMPLETE)]
    result = CliRunner().invoke(app, ["data", "import-atif", *map(str, paths), "--out", str(tmp_path / "out.jsonl")])
    assert result.exit_code == terminal.EXIT_FAILED
    assert "0 steps act" in result.output
    assert len(read_jsonl(tmp_path / "out.jsonl").trajectories) == 1


@pytest.mark.parametrize(
    ("arguments", "actions"),
    [
        ({"type": "double_click", "x": 1, "y": 2, "modifier": "ctrl"}, [Click(1, 2, "left", 2, ("ctrl",))]),
        ({"type": "right_click", "x": 1, "y": 2}, [Click(1, 2, "right")]),
        ({"type": "drag", "x": 1, "y": 2, "end_x": 3, "end_y": 4}, [Drag(3, 4, 1, 2)]),
        ({"type": "scroll", "x": 1, "y": 2, "scroll_y": -250}, [Scroll(dy=-2, x=1, y=2)]),
        ({"type": "scroll", "scroll_x": 30}, [Scroll(dx=1)]),
        ({"type": "type", "text": "a"}, [TypeText("a")]),
        ({"type": "screenshot"}, []),
        ({"type": "terminate", "text": "42"}, [Done("42")]),
    ],
)
def test_actions_of_computer_1_map(arguments: dict[str, Any], actions: list[Any]) -> None:
    assert actions_of("computer_action", arguments) == actions
