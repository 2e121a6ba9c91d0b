"""Trajectories in ATIF: Harbor's validator accepts ours."""

import base64
import io
import json
from pathlib import Path

import pytest
from harbor.models.trajectories import Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator
from PIL import Image
from typer.testing import CliRunner

from cuaenv.client import Click, Done, PressKeys
from trainer.agent.grammars import grammar
from trainer.cli.app import app
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
