"""`envd image templates` with small invented templates."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envd.cli.image import app
from envd.daemon.state_lock import locked
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore
from tests.support.qemu_templates import add_template

MIB = 1 << 20


def run(state_dir: Path, *args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["templates", *args, "--state-dir", str(state_dir)])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def run_json(state_dir: Path, *args: str) -> Any:
    return json.loads(run(state_dir, *args, "--json"))


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Two templates of 1 MiB each; `k-old` was used first."""
    state_dir = tmp_path / "state"
    store = QemuTemplateStore(state_dir / "templates", limit_bytes=1 << 30)
    for key, use_time_s in (("k-old", 1_000_000_000), ("k-new", 2_000_000_000)):
        add_template(store, key, size=MIB, use_time_s=use_time_s)
    store.close()
    return state_dir


def keys(state_dir: Path) -> list[str]:
    return [template["key"] for template in run_json(state_dir, "list")["templates"]]


def test_templates_are_listed_with_their_properties_and_size(state_dir: Path) -> None:
    assert keys(state_dir) == ["k-old", "k-new"]
    (old, _) = run_json(state_dir, "list")["templates"]
    assert (old["image"], old["screen"], old["last_use_time"]) == ("desktop", "1280x800", "2001-09-09T01:46:40+00:00")
    assert MIB <= old["size_bytes"] < 2 * MIB
    assert all(key in run(state_dir, "list") for key in ("k-old", "k-new"))


def test_pruning_removes_the_least_recently_used_and_lists_them(state_dir: Path) -> None:
    assert run(state_dir, "prune") == "removed none, 0 MiB\n"
    limit_gib = 1.5 * MIB / (1 << 30)
    assert run(state_dir, "prune", "--limit-gib", str(limit_gib)) == "removed k-old (desktop), 1 MiB\n"
    assert keys(state_dir) == ["k-new"]
    gone = run_json(state_dir, "prune", "--all")
    assert [template["key"] for template in gone["removed"]] == ["k-new"]
    assert gone["freed_bytes"] >= MIB
    assert list((state_dir / "templates" / "memory").iterdir()) == []


def test_the_templates_of_a_running_daemon_are_kept_and_flags_exclude_each_other(state_dir: Path) -> None:
    with locked(state_dir):
        message = run(state_dir, "prune", "--all", status=2)
    assert f"is in use by envd, process {os.getpid()}" in message
    assert keys(state_dir) == ["k-old", "k-new"]
    assert "exclude each other" in run(state_dir, "prune", "--all", "--limit-gib", "1", status=2)


def test_listing_an_absent_directory_creates_nothing(tmp_path: Path) -> None:
    assert keys(tmp_path / "none") == []
    assert run_json(tmp_path / "none", "prune", "--all") == {"removed": [], "freed_bytes": 0}
    assert list(tmp_path.iterdir()) == []
