"""The first stage of every recipe on drawn desktops, without GPU, model and slime."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.program import run_program
from tests.support.server import serve_fake
from trainer.recipes.catalogue import launcher, names


async def smoke_env(
    name: str, target: str, run_dir: Path, *, task: str = "fake/enable", flags: tuple[str, ...] = ()
) -> tuple[int | None, str]:
    variables = {"ENVD_TARGET": target, "SMOKE_TASK": task, "PYTHON": sys.executable, "RUN_DIR": str(run_dir)}
    done = await run_program("bash", launcher(name), *flags, "smoke-env", env={**os.environ, **variables})
    return done.status, done.out + done.err


async def test_the_first_stage_runs_an_episode_on_a_desktop(tmp_path: Path) -> None:
    async with serve_fake(size=1) as server:
        status, said = await smoke_env("smoke_text", server.address, tmp_path / "run")
    assert status == 0, said
    assert "score 0.00 after 1 turn (done)" in said
    assert (tmp_path / "run" / "fake.enable-0.html").is_file()


@pytest.mark.parametrize("name", names())
async def test_every_recipe_starts_with_the_same_episode(name: str, tmp_path: Path) -> None:
    status, said = await smoke_env(name, "127.0.0.1:1", tmp_path, flags=("--dry-run",))
    words = [sys.executable, "-m", "trainer", "play", "fake/enable", "--by", "null", "--envd", "127.0.0.1:1"]
    assert (status, shlex.split(said)) == (0, [*words, "--out", str(tmp_path)])


async def test_an_unknown_task_ends_the_stage_with_the_reason(tmp_path: Path) -> None:
    async with serve_fake(size=1) as server:
        status, said = await smoke_env("smoke_text", server.address, tmp_path / "run", task="fake/none")
    assert status == 1
    assert "the daemon does not serve fake/none" in said
