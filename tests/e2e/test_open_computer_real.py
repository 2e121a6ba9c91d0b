"""A task in OpenComputer's format on real guests: its own set-up and verifier, and agents that try to mislead it."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cuaenv.actions import PressKeys, TypeText
from cuaenv.client import AsyncEnvClient, View
from envd.integrations.open_computer.reader import read_repository
from envd.tasks.catalogue import TaskCatalogue, TaskFile
from tests.support.open_computer import VERIFIER_WITH_TREE, make_repository
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TASK = "opencomputer/notes_total"
NO_PIXELS = View(encoding="none")
WRITE = "printf %s > ~/Documents/total.txt"


@pytest_asyncio.fixture
async def client(real_backend: Backend, vm_state_dir: Path, tmp_path: Path) -> AsyncIterator[AsyncEnvClient]:
    root = make_repository(tmp_path)
    file, verifiers = root / "task_generator/tasks/notes_tree/task.json", root / "verifiers"
    shutil.copytree(file.parents[1] / "notes_total", file.parent)
    shutil.copytree(verifiers / "notes", verifiers / "tree")
    check = {"command": "tree", "eval": "result == {'frames': [1], 'user': 1000, 'source': ''}"}
    changes = {"id": "notes_tree", "app": "tree", "verification": [check]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (verifiers / "tree/tree.py").write_text(VERIFIER_WITH_TREE)
    found = TaskCatalogue.load([TaskFile(root, read=read_repository)], include_builtin=False)
    # Its application is one of the desktop image, under a name of the test.
    tasks = TaskCatalogue(task.model_copy(update={"needs": ()}) for task in found.list())
    async with real_backend.desktops(tasks, state_dir=vm_state_dir) as client:
        yield client


async def test_its_own_code_sets_up_saves_and_checks_and_leaves_nothing_to_the_agent(client: AsyncEnvClient) -> None:
    async with client.reset_group(TASK, size=3, view=NO_PIXELS) as (idle, solved, broken):
        listed = await idle.run_command(["sh", "-c", "ls -a /tmp; wmctrl -l"])
        assert b"report.csv" in listed.stdout
        assert b".opencomputer" not in listed.stdout
        nothing = await idle.evaluate()
        assert [check.score for check in nothing.checks] == [0, 0, 0]
        # A check that fails is tried on another machine, which must be free.
        await idle.close()
        # The save shortcut is sent before the check, so what was typed is in the file.
        await solved.step(PressKeys(("ctrl", "End")), TypeText("c,5"))
        await solved.run_command(["sh", "-c", WRITE % "7"])
        right = await solved.evaluate()
        assert right.score == 1.0
        assert '"rows": 3' in right.checks[1].evidence
        # The verifier fails on what is not a number, and prints no JSON. On a machine at the task's start it works.
        await broken.run_command(["sh", "-c", WRITE % "seven"])
        failed = await broken.evaluate()
        assert (failed.score, failed.guest_end_cause) == (0, "UNCHECKABLE")


async def test_a_verifier_that_reads_the_accessibility_tree_runs_as_its_user(client: AsyncEnvClient) -> None:
    async with client.reset("opencomputer/notes_tree", view=NO_PIXELS) as episode:
        evaluation = await episode.evaluate()
        assert evaluation.score == 1.0, evaluation.checks


# Each runs as the agent's user and remains until the check begins.
FORGERIES = {
    "a total that is written when the verifier appears": (
        "nohup python3 -c \"import glob, time\nwhile not glob.glob('/root/.open*/verifiers/*'): time.sleep(0.01)\n"
        "open('/home/user/Documents/total.txt', 'w').write('7')\" >/dev/null 2>&1 &"
    ),
    "a shell that corrects the total all the time, once its parent is stopped": (
        "nohup sh -c 'while :; do [ -d /root/.opencomputer ] && echo 7 > ~/Documents/total.txt; sleep 0.01; done' "
        ">/dev/null 2>&1 &"
    ),
    "modules of the agent in place of Python's": (
        "mkdir -p ~/.local/lib/python3.11/site-packages ~/Documents;"
        " for place in ~/.local/lib/python3.11/site-packages ~/Documents ~;"
        ' do echo \'print("{\\"exists\\": true, \\"total\\": 7}"); raise SystemExit\' > $place/json.py; done'
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_the_agents_programs_neither_see_the_verifier_nor_replace_what_it_uses(
    client: AsyncEnvClient, forgery: str
) -> None:
    async with client.reset(TASK, view=NO_PIXELS) as episode:
        started = await episode.run_command(["sh", "-c", FORGERIES[forgery]])
        assert started.exit_code == 0, started
        assert (await episode.evaluate()).score == 0.0
