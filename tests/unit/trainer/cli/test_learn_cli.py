"""`trainer learn`: what it refuses before anything starts, and its end by a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cuaenv.cli import terminal
from trainer.cli.app import app
from trainer.learn import LearnError
from trainer.learn.demos import read_rows


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["rl"], terminal.EXIT_USAGE, "not a checkout; run `trainer learn setup`"),
        (["demos", "--envd", "127.0.0.1:1", "--config", "slow.yaml"], terminal.EXIT_USAGE, "leave out one of them"),
        (["demos", "--config", "wrong.yaml"], terminal.EXIT_FAILED, "rl.upgrades: unknown key; did you mean updates?"),
        (["demos", "--config", "plugin.yaml"], terminal.EXIT_FAILED, "envd.groop: unknown key; did you mean group?"),
        (["demos", "--config", "missing.yaml"], terminal.EXIT_FAILED, "give a YAML file of settings"),
        (["report"], terminal.EXIT_FAILED, "no demonstrations"),
    ],
)
def test_wrong_input_is_refused_with_the_remedy(
    words: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLIME_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("slow.yaml").write_text("desktops: {reaction_ms: 5}\n")
    Path("wrong.yaml").write_text("rl: {upgrades: 3}\n")
    Path("plugin.yaml").write_text("rl: {envd: {groop: tree}}\n")
    result = CliRunner().invoke(app, ["learn", *words])
    assert result.exit_code == status, result.output
    assert message in " ".join(result.output.split())
    assert {path.name for path in tmp_path.iterdir()} == {"slow.yaml", "wrong.yaml", "plugin.yaml"}


@pytest.mark.parametrize("stage", ["all", "demos", "clone", "rl", "report"])
def test_only_the_stage_base_has_several_processes(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["learn", stage, "--smoke", "--run", str(tmp_path / "run")])
    assert result.exit_code == terminal.EXIT_USAGE, result.output
    assert "start the other stages without torchrun" in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_demonstrations_without_a_row_to_measure_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="run the stage `demos` first"):
        read_rows(tmp_path)
    (tmp_path / "frames.bin").write_bytes(b"")
    np.savez(tmp_path / "rows.npz", is_checked=np.zeros(3, bool))
    with pytest.raises(LearnError, match=r"no row is held out to measure cloning; play more seeds \(demos.seeds\)"):
        read_rows(tmp_path)


def test_a_command_that_is_terminated_ends_its_daemons(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", "learn", "demos", "--smoke", "--run", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "stage demos\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        handles = [os.pidfd_open(int(pid)) for pid in children if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        try:
            assert len(handles) == 1
            process.send_signal(signal.SIGTERM)
            process.communicate()
            assert process.returncode
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(handles[0], 0)
        finally:
            for handle in handles:
                os.close(handle)
