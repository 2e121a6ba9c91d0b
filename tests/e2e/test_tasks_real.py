"""The desktop suite on real guests: oracles score 1.0 and doing nothing 0.0, over gRPC.

`ENVD_TEST_TASKS=all` plays the whole suite instead of a selection: a drawn variant of each template.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cuaenv.actions import Action, Done
from cuaenv.client import AsyncEnvClient, AsyncEpisode, StepResult, View
from envd.authoring.playing import Steps, max_steps_of, play
from envd.base.config import LimitsConfig
from envd.tasks.catalogue import TaskCatalogue
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

CATALOGUE = TaskCatalogue.load()
ALL = [
    f"{task.task_id}?seed=1" if CATALOGUE.variant_count(task.task_id) > 1 else task.task_id for task in CATALOGUE.list()
]
#: An infeasible task, keys and a pointer, characters of no key, a chord of three keys, a drag, and the panel.
SELECTED = [
    "desktop/letter-that-is-not-there",
    "desktop/sort-invoices?seed=1",
    "desktop/type-unicode",
    "desktop/new-folder",
    "desktop/drag-into-folder",
    "desktop/open-calculator",
]
TASK_IDS = ALL if os.environ.get("ENVD_TEST_TASKS") == "all" else SELECTED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(real_backend: Backend, vm_state_dir: Path) -> AsyncIterator[AsyncEnvClient]:
    async with real_backend.desktops(CATALOGUE, state_dir=vm_state_dir) as client:
        yield client


async def score_of(episode: AsyncEpisode, steps: Steps) -> float:
    """Play steps in an episode; return its score."""
    errors: list[str] = []

    def on_step(_actions: tuple[Action, ...], result: StepResult) -> None:
        errors.extend(result.errors)

    await play(episode, steps, runs_guests=True, on_step=on_step)
    assert errors == []
    return (await episode.evaluate()).score


@pytest.mark.parametrize("task_id", TASK_IDS)
async def test_the_oracle_scores_one_and_doing_nothing_zero(
    client: AsyncEnvClient, real_backend: Backend, task_id: str
) -> None:
    task = CATALOGUE.get(task_id)
    max_steps = max_steps_of(task, limit=LimitsConfig().max_steps)
    async with client.reset_group(task_id, size=2, max_steps=max_steps, view=View(encoding="none")) as (idle, solved):
        # Each container runs the task's setup by itself.
        assert idle.observation.frame_id == solved.observation.frame_id or not real_backend.is_qemu
        assert await score_of(idle, [(Done(),)]) == 0.0
        assert await score_of(solved, task.oracle) == 1.0
