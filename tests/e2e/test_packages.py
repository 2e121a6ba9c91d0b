"""The packages that users install: both artefacts are built, and each runs in an environment of its own."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What differs between a checkout and an installed package: bindings, recipes, launchers, suites and the console.
FILES = (
    "cuaenv/v1/env_pb2.py",
    "envd/console/static/index.html",
    "envd/base/store/schema.sql",
    "envd/images/customize.sh",
    "envd/tasks/suites",
    "trainer/recipes/smoke_text.sh",
    "envd_desktop",
)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel that was built from the source distribution, and that source distribution.

    Built with the packages of this environment; `make dist` installs the pinned ones for it.
    """
    directory = tmp_path_factory.mktemp("dist")
    here = ["--no-isolation", "--skip-dependency-check"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "build", *here, "--outdir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PATH": path})
    return sorted(directory.iterdir())


def test_a_wheel_is_built_from_the_source_distribution(artefacts: list[Path]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [path.name.partition("-")[2].partition("-")[0] for path in artefacts] == [version, f"{version}.tar.gz"]


def test_an_installed_package_is_complete(artefacts: list[Path], tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, tmp_path / "site", artefacts[0]], check=True, capture_output=True)
    assert [name for name in FILES if not (tmp_path / "site" / name).exists()] == []
    # Its own modules, not the checkout's: -P leaves the working directory out of the path.
    code = "import cuaenv.client, envd, trainer.cli; print(envd.__file__)"
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert shown.stdout.startswith(str(tmp_path))


def test_the_client_needs_no_more_than_its_extra(tmp_path: Path) -> None:
    """Imports the client where only the base dependencies and the extra `client` can be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["client"]
    heavy = {"aiohttp", "jinja2", "pyarrow", "pydantic", "rich", "typer", "yaml"}
    assert heavy.isdisjoint(requirement.partition(">")[0] for requirement in extra)
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(heavy)}))  # None: the import fails
import io
import numpy
import trainer.client
from cuaenv.frames import image
print(trainer.client.EnvClient("127.0.0.1:1"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert "envd-trainer[client]" in project["optional-dependencies"]["trainer"]
