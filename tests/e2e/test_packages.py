"""The packages that users install: both artefacts are built, and each runs in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from cuaenv.client import AsyncEnvClient
from tests.support.program import run_program
from tests.support.scripted_model import ScriptedModel, served
from tests.support.server import serve_fake

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


@pytest.fixture(scope="module")
def python(artefacts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Python of an environment that has the wheel, and from here only what the wheel depends on."""
    home, here = tmp_path_factory.mktemp("installed") / "venv", Path(sysconfig.get_path("purelib"))
    venv.create(home)
    (site,) = home.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, site, artefacts[0]], check=True, capture_output=True)
    # The editable project of this environment is named by a .pth file there, which is not followed.
    (site / "dependencies.pth").write_text(f"{here}\n")
    return home / "bin" / "python"


def test_a_wheel_is_built_from_the_source_distribution(artefacts: list[Path]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [path.name.partition("-")[2].partition("-")[0] for path in artefacts] == [version, f"{version}.tar.gz"]


def test_an_installed_package_is_complete(python: Path) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    assert [name for name in FILES if not (site / name).exists()] == []


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


#: Own prompt, grammar, reward, advantage, branch policy and curriculum, used as an installed package has them.
OWN_CODE = """
import asyncio, sys
from types import SimpleNamespace
import envd
import trainer
from trainer.agent.attempts import play_task
from trainer.agent.types import Reply
from trainer.client import AsyncEnvClient
from trainer.data.curriculum import TaskHistory, curriculum_of
from trainer.slime.config import SlimeConfig
from my_advantage import leave_one_out

config = SlimeConfig.from_mapping({
    "hosts": [sys.argv[1]],
    "agent": {"prompt": "my_prompt:Terse", "grammar": "my_grammar:Lines", "max_turns": 6},
    "reward": {"recipe": "my_reward:Brisk", "per_turn": 0.1},
    "group": "tree",
    "branch": "my_branch:early",
    "curriculum": "my_curriculum:not_yet_easy",
})


class Model:
    replies = iter(["click 640 125", "nonsense", "done"])

    async def begin(self, messages):
        print(messages[0].parts[0].splitlines()[0])

    async def append(self, message):
        pass

    async def generate(self):
        return Reply(text=next(self.replies))


async def main():
    async with AsyncEnvClient(sys.argv[1]) as client:
        played = await play_task(client, "fake/count-to-five", Model, settings=config.agent)
    facts = played.facts(max_turns=6, metadata={})
    print([turn.parsed for turn in facts.turns], dict(config.breakdown_of(facts).parts))


asyncio.run(main())
print(*(config.branch_policy(turns_since=turns, reply=Reply(text="")) for turns in (3, 2)))
easy = TaskHistory(task_id="t", solved=(True,) * 10)
print(curriculum_of(config.curriculum)(easy), curriculum_of(config.curriculum)(TaskHistory(task_id="t")))
finished = SimpleNamespace(name="COMPLETED")
group = [
    SimpleNamespace(
        index=n, group_index=0, reward=reward, rollout_id=n, metadata={}, remove_sample=False, status=finished
    )
    for n, reward in enumerate([1.0, 0.0, 0.5])
]
print(leave_one_out(None, group))
print(trainer.__file__, envd.__file__)
"""


async def test_an_installed_package_plays_and_evaluates_with_own_code(python: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(ROOT / "docs" / "examples" / "own", own)
    (tmp_path / "agent.yaml").write_text('{prompt: "my_prompt:Terse", grammar: "my_grammar:Lines", max_turns: 3}\n')
    # -P leaves the working directory out of the path: its own modules run, not the checkout's.
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(own)}
    async with serve_fake(size=1, capacity=1) as server, AsyncEnvClient(server.address) as client:
        done = await run_program(python, "-P", "-c", OWN_CODE, server.address, cwd=tmp_path, env=environment)
        assert done.status == 0, done.err
        (task,) = await client.list_tasks(task_ids=["fake/enable"])
        async with served(ScriptedModel({f"Goal: {task.instruction}": ["click 642 209", "done"]})) as url:
            (tmp_path / "run.toml").write_text(f'endpoint = "{url}"\nenvd = "{server.address}"\nagent = "agent.yaml"\n')
            words = ("eval", "run.toml", "--task", task.task_id, "--json")
            evaluated = await run_program(python, "-P", "-m", "trainer", *words, cwd=tmp_path, env=environment)
        assert evaluated.status == 0, evaluated.err
    lines = done.out.splitlines()
    assert lines[0] == "You use a computer. After each reply you see a screenshot. 6 replies."
    assert lines[1].startswith("[True, False, True] {'task': 0.0, 'turns': -0.3")
    assert lines[2:4] == ["True False", "False True"]
    assert lines[4] == "([1.0, 0.0, 0.5], [0.75, -0.75, 0.0])"
    assert [Path(file).is_relative_to(python.parents[1]) for file in lines[5].split()] == [True, True]
    (row,) = json.loads(evaluated.out)["runs"][0]["rows"][:1]
    assert row["success"]["mean"] == 1.0
