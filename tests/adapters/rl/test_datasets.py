"""Tables of `trainer data export-parquet` in the package `datasets`, which TRL trains on."""

import base64
import io
import json
from pathlib import Path

import pytest
from datasets import Features, Image, load_dataset
from PIL import Image as Pillow
from typer.testing import CliRunner

from trainer.cli.app import app

# Warnings of the framework are not ours.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize(("options", "columns"), [([], ["messages"]), (["--preferences"], ["chosen", "prompt"])])
def test_a_table_is_loaded_with_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], columns: list[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    buffer = io.BytesIO()
    Pillow.new("RGB", (64, 32), "red").save(buffer, "PNG")
    picture = base64.b64encode(buffer.getvalue()).decode()
    user = {"role": "user", "content": "<image>Do it."}
    rows = [
        {
            "task_id": "a",
            "messages": [user, {"role": "assistant", "content": reply}],
            "images": [picture],
            "reward": score,
        }
        for reply, score in (("save", 1.0), ("quit", 0.0))
    ]
    source, file = tmp_path / "rows.jsonl", tmp_path / "table.parquet"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data", "export-parquet", str(source), *options, "--out", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0
    loaded = load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(loaded.features, Features)
    [row] = loaded
    assert [image.size for image in row["images"]] == [(64, 32)]
    assert row["images"][0].getpixel((0, 0)) == (255, 0, 0)
    assert Image in {type(loaded.features["images"].feature)}
    for column in columns:
        assert row[column][0]["content"][-1]["type"] == "text"
