"""The metrics of a run in files."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer.learn.record import MetricsLog


class Board:
    """Like TensorBoard's writer, it makes its directory at once."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir()
        self.scalars: list[tuple[Any, ...]] = []

    def add_scalar(self, *scalar: Any) -> None:
        self.scalars.append(scalar)

    def close(self) -> None:
        (self.directory / "events").write_text(json.dumps(self.scalars))


def test_a_process_that_writes_no_metrics_makes_no_file_of_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    with MetricsLog(tmp_path):
        pass
    assert not (tmp_path / "tensorboard").exists()
    with MetricsLog(tmp_path) as log:
        log.write("base", 1, {"loss": 0.5})
        log.write("base", 2, {"loss": 0.25})
    assert json.loads((tmp_path / "tensorboard" / "events").read_text()) == [
        ["base/loss", 0.5, 1],
        ["base/loss", 0.25, 2],
    ]
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0.5, 0.25]
