"""Trajectories in ATIF: Harbor's validator accepts ours, and we read those of its agent computer-1."""

import base64
import io
import json
from pathlib import Path

import pytest
from harbor.agents.computer_1.computer_1 import _action_arguments
from harbor.agents.computer_1.runtime import ComputerAction
from harbor.models.trajectories import (
    Agent,
    ContentPart,
    ImageSource,
    Observation,
    ObservationResult,
    Step,
    ToolCall,
    Trajectory,
)
from harbor.utils.trajectory_validator import TrajectoryValidator
from PIL import Image
from typer.testing import CliRunner

from cuaenv.client import Click, Done, PressKeys
from trainer.agent.grammars import grammar
from trainer.agent.settings import AgentSettings
from trainer.cli.app import app
from trainer.data.atif_import import from_atif
from trainer.replay.trajectory import StoredTrajectory

# Warnings of the framework are not ours.
pytestmark = pytest.mark.filterwarnings("default")
GRAMMAR = grammar("qwen3-vl")


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (640, 320), colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_harbor_accepts_what_we_export(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "You act."}, {"role": "user", "content": "<image>Task: save it."}]
    for reply in (GRAMMAR.render([Click(500, 250), PressKeys(["ctrl", "s"])]), "Hm.", GRAMMAR.render([Done("yes")])):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "<image>Done."}]
    pictures = [f"data:image/png;base64,{base64.b64encode(png(each)).decode()}" for each in ("red", "blue", "green")]
    trajectory = StoredTrajectory(task_id="desktop/note", messages=tuple(messages[:-1]), images=tuple(pictures))
    (tmp_path / "rows.jsonl").write_text(json.dumps(trajectory.as_row()) + "\n")
    done = CliRunner().invoke(
        app, ["data", "export-atif", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "atif")]
    )
    assert done.exit_code == 0, done.output
    document = tmp_path / "atif" / "0001-desktop-note" / "trajectory.json"
    validator = TrajectoryValidator()
    assert validator.validate(document), validator.errors
    read = Trajectory.model_validate_json(document.read_text())
    assert read.has_multimodal_content()
    assert [len(step.tool_calls or ()) for step in read.steps] == [0, 0, 2, 0, 1]
    (document.parent / "images" / "0003.png").unlink()
    assert not validator.validate(document)


def test_we_read_what_computer_1_records(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name, colour in (("first", "red"), ("second", "blue")):
        (tmp_path / "images" / f"{name}.png").write_bytes(png(colour))
    picture = ContentPart(type="image", source=ImageSource(media_type="image/png", path="images/second.png"))
    click = ComputerAction(type="click", x=320, y=160)
    steps = [
        Step(step_id=1, source="user", message="Save the note."),
        Step(
            step_id=2,
            source="agent",
            message="Analysis: a note.\nPlan: click.",
            tool_calls=[
                ToolCall(tool_call_id="a", function_name="computer_action", arguments=_action_arguments(click))
            ],
            observation=Observation(results=[ObservationResult(source_call_id="a", content=[picture])]),
        ),
        Step(
            step_id=3,
            source="agent",
            message="",
            tool_calls=[
                ToolCall(
                    tool_call_id="b",
                    function_name="computer_action",
                    arguments=_action_arguments(ComputerAction(type="done", result="saved")),
                ),
                ToolCall(tool_call_id="c", function_name="mark_task_complete", arguments={"result": "saved"}),
            ],
        ),
    ]
    trajectory = Trajectory(session_id="s", agent=Agent(name="computer-1", version="1"), steps=steps)
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(trajectory.to_json_dict()))
    read = from_atif(path, settings=AgentSettings(), first_picture="images/first.png")
    assert [message["role"] for message in read.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert read.messages[2]["content"].startswith("Analysis: a note.\nPlan: click.\n<tool_call>")
    assert "saved" in read.messages[4]["content"]
    assert read.metadata["source"] == "atif:computer-1"
