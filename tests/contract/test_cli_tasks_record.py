"""`envd tasks record` by a script, on drawn desktops."""

from pathlib import Path

import pytest
import yaml

from tests.support.command import run_envd

SCRIPT = [[{"press": ["ctrl", "end"]}, {"type": "eggs"}], [{"press": ["ctrl", "s"]}]]
SETUP = [
    {"kind": "write_file", "path": "/home/user/list.txt", "text": "milk\n"},
    {"kind": "write_file", "path": "/home/user/other.txt", "text": "stays\n"},
    {"kind": "open", "path": "/home/user/list.txt", "program": "editor"},
]


def record(tmp_path: Path, script: object, *more: str) -> tuple[int, str]:
    for name, value in (("script", script), ("setup", SETUP)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
    words = ("tasks", "record", "shop/add", "--instruction", "Add eggs.", "--hypervisor", "fake", "--accept")
    files = ("--script", str(tmp_path / "script.yaml"), "--setup", str(tmp_path / "setup.yaml"))
    done = run_envd(*words, *files, "--out", str(tmp_path), "--state-dir", str(tmp_path / "state"), *more)
    return done.status, done.out + done.err


def test_what_a_script_changed_becomes_the_checker(tmp_path: Path) -> None:
    status, text = record(tmp_path, SCRIPT)
    assert status == 0, text
    (task,) = yaml.safe_load((tmp_path / "shop-add.yaml").read_text())["tasks"]
    changed, rest = task["checker"]["checks"]
    assert changed == {"kind": "file_text", "path": "/home/user/list.txt", "equals": "milk\neggs"}
    assert (rest["kind"], rest["except"][-1]) == ("unchanged", "/home/user/list.txt")
    assert task["oracle"] == [*SCRIPT, [{"done": ""}]]
    assert "exists" in record(tmp_path, SCRIPT)[1]


@pytest.mark.parametrize(
    ("script", "error"),
    [([[{"press": "f1"}]], "no checker was chosen"), ([[{"clck": {}}]], "--script"), ({}, "not a YAML")],
)
def test_a_script_that_changes_nothing_or_is_malformed_writes_no_task(
    tmp_path: Path, script: object, error: str
) -> None:
    status, text = record(tmp_path, script)
    assert (status, error in text, (tmp_path / "shop-add.yaml").exists()) == (2, True, False), text
