"""Installing OSWorld's package and registering its tasks; both are atomic."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from envd.base.errors import OsworldError
from envd.integrations.osworld import environment
from envd.integrations.osworld.environment import Environment


def report(stage: str, fraction: float) -> None:
    assert stage
    assert 0 <= fraction <= 1


def checkout(directory: Path) -> Path:
    examples = directory / "evaluation_examples" / "examples" / "os"
    examples.mkdir(parents=True)
    (examples / "one.json").write_text("{}")
    return directory


def entries(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()} - {".lock"}


def test_tasks_of_a_checkout_are_used_in_place(tmp_path: Path) -> None:
    assert Environment(tmp_path / "cache").tasks is None
    found = Environment(tmp_path / "cache")
    found.register_tasks(str(checkout(tmp_path / "one")), progress=report)
    assert found.tasks == tmp_path / "one" / "evaluation_examples"
    found.register_tasks(str(checkout(tmp_path / "two") / "evaluation_examples"), progress=report)
    assert found.tasks == tmp_path / "two" / "evaluation_examples"
    assert entries(found.root) == {"tasks"}


@pytest.mark.parametrize("source", ["no-such-directory", "."])
def test_a_source_must_be_a_checkout(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OsworldError, match=r"neither a directory|not a checkout"):
        Environment(tmp_path / "cache").register_tasks(source, progress=report)
    assert Environment(tmp_path / "cache").tasks is None


def test_a_clone_that_fails_leaves_nothing(tmp_path: Path) -> None:
    found = Environment(tmp_path)
    with pytest.raises(OsworldError, match="git clone failed"):
        found.register_tasks(f"file://{tmp_path}/no-such-repository", progress=report)
    assert entries(found.root) == set()


def test_an_installation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = Environment(tmp_path)
    (found.root / ".making-of-a-killed-one" / "bin").mkdir(parents=True)
    with pytest.raises(OsworldError, match="python -m venv failed with status 1"):
        found.install(progress=report)
    assert (found.is_installed, entries(found.root)) == (False, set())


def test_an_installation_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: Sequence[str], *, what: str, on_line: object = None) -> None:
        Path(command[-1], "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Environment, "_run", staticmethod(interrupted))
    found = Environment(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        found.install(progress=report)
    assert (found.is_installed, entries(found.root)) == (False, set())


def test_an_installation_appears_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def pretend(command: Sequence[str], *, what: str, on_line: object = None) -> None:
        ran.append(what)
        assert not found.is_installed
        if what == "python -m venv":
            (Path(command[-1]) / "bin").mkdir()
            os.symlink(sys.executable, Path(command[-1]) / "bin" / "python")
        if what == "import desktop_env":
            Path(command[-1]).write_text('{"verbs": ["launch"], "getters": [], "metrics": []}')

    monkeypatch.setattr(Environment, "_run", staticmethod(pretend))
    found = Environment(tmp_path)
    found.install(progress=report)
    assert found.is_installed
    assert ran[-1] == "import desktop_env"
    assert found.known_names() == {"verbs": ["launch"], "getters": [], "metrics": []}
    ran.clear()
    found.install(progress=report)
    assert ran == []


def test_an_earlier_installation_gets_its_names_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(command: Sequence[str], *, what: str, on_line: object = None) -> None:
        assert what == "import desktop_env"
        Path(command[-1]).write_text('{"verbs": [], "getters": [], "metrics": []}')

    found = Environment(tmp_path)
    found.python.parent.mkdir(parents=True)
    found.python.touch()
    (found.directory / "envd-names.json").write_text('{"verbs"')
    assert found.known_names() is None
    monkeypatch.setattr(Environment, "_run", staticmethod(pretend))
    found.install(progress=report)
    assert found.known_names() is not None


def test_the_list_is_pinned_without_torch_and_another_is_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for line in environment.requirements().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    assert not any(name in environment.requirements() for name in ("torch", "easyocr"))
    before = Environment(tmp_path).directory
    monkeypatch.setattr(environment, "requirements", lambda: "numpy==1.26.4\n")
    assert Environment(tmp_path).directory != before
    assert Environment(tmp_path).directory.parent == before.parent
