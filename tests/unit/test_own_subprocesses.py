"""Own Python subprocesses import nothing from the directory in which a command was started."""

import re
from pathlib import Path

import pytest

from envd.base.errors import EnvdError
from envd.base.venv import PinnedEnvironment, Progress
from envd.bench.child import run_module
from trainer.learn.daemons import print_oracles

ROOT = Path(__file__).parents[2]
#: An interpreter's name or variable, and the option that makes its working directory the first place of imports.
STARTS_PYTHON = re.compile(r"""\w*([Pp]ython3?|executable)["')]*,(?P<options>.*)"-[mc]\"""")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules of well-known names that end what imports them."""
    directory = tmp_path / "hostile"
    for name in ("envd", "trainer", "cuaenv", "venv", "ensurepip", "pip", "json", "logging", "asyncio"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(directory)
    return tmp_path


class OfPip(PinnedEnvironment):
    """An environment with nothing but pip."""

    def _fill(self, staging: Path, progress: Progress) -> None:
        self._pip(staging, "--dry-run", "--no-index", "pip", progress=progress)


def test_every_python_that_envd_and_the_trainer_start_ignores_the_working_directory() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("envd", "trainer", "proto")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if (start := STARTS_PYTHON.search(line)) and not re.search(r'"-[sS]*[IP]"', start["options"])
    }
    # It is started in the root directory of the guest.
    assert {line.partition(":")[0] for line in found} == {"envd/guests/guestd/a11y/client.py"}


def test_the_commands_of_the_trainers_own_daemons_ignore_the_working_directory(hostile: Path) -> None:
    print_oracles(hostile / "oracles", suite="drawn", seeds=range(1))
    assert (hostile / "oracles").read_text()


async def test_the_processes_of_benchmarks_ignore_the_working_directory(hostile: Path) -> None:
    async with run_module("this") as child:
        assert await child.stdout.readline() == b"The Zen of Python, by Tim Peters\n"


def test_virtual_environments_are_installed_without_the_working_directory(hostile: Path) -> None:
    environment = OfPip(hostile / "environments", [], error=EnvdError, package_count=0)
    environment.install(progress=lambda *_: None)
    assert environment.python.exists()
