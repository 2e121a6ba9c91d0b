"""A CUA-Gym bundle on real guests: a score, a `check.sh` that fails, which is never a score, and forged results."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cuaenv.client import AsyncEnvClient, EvaluatorFailed, View
from envd.integrations.cua_gym.reader import read_bundles
from envd.tasks.catalogue import TaskCatalogue, TaskFile
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FILES = {
    "meta.json": '{"driver": "uda-gym"}',
    "instruction.md": "Write the total of the report.\n",
    "exec/context/report.csv": "a,3\nb,4\n",
    "setup.sh": 'mkdir -p "$UDA_GYM_HARNESS_STATE_DIR"; chmod 777 /tmp_workspace/results\n',
    "gt/total.txt": "7",
    "check.sh": "set -eu\n"
    'test "$(cat /tmp_workspace/results/total.txt)" = "$(cat /tmp_workspace/gt/total.txt)"\n'
    "echo '{\"overall_score\": 1.0}'\n",
}


@pytest_asyncio.fixture
async def client(real_backend: Backend, vm_state_dir: Path, tmp_path: Path) -> AsyncIterator[AsyncEnvClient]:
    for name, text in FILES.items():
        file = tmp_path / "report" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    tasks = TaskCatalogue.load([TaskFile(tmp_path, read=read_bundles)], include_builtin=False)
    async with real_backend.desktops(tasks, state_dir=vm_state_dir) as client:
        yield client


async def test_a_check_that_fails_is_an_error_and_no_score(client: AsyncEnvClient) -> None:
    async with client.reset_group("cua-gym/report", size=2, view=View(encoding="none")) as (solved, broken):
        await solved.run_command(["sh", "-c", "printf 7 > /tmp_workspace/results/total.txt"])
        assert (await solved.evaluate()).score == 1.0
        # Without the file, this bundle's check exits with a status other than 0 and prints no score.
        with pytest.raises(EvaluatorFailed):
            await broken.evaluate()


# Each runs as the agent's user and remains until the check begins.
FORGERIES = {
    "a link to the truth": "rm -rf results; mkdir results; ln -s ../gt/total.txt results/total.txt",
    "a link that is made while the check begins": (
        "nohup sh -c 'while :; do ln -sf ../gt/total.txt results/total.txt; done' >/dev/null 2>&1 &"
    ),
    "another check": (
        """mkdir ~/forged; printf %s 'echo "{\\"overall_score\\": 1.0}"' > ~/forged/check.sh;"""
        " nohup sh -c 'while :; do"
        " [ ! -e gt ] || for private in .uda_private /root/.uda_private; do mv $private old; cp -r ~/forged $private;"
        " done; done' >/dev/null 2>&1 &"
    ),
    "the truth, copied when it appears": (
        "nohup sh -c 'until cat gt/total.txt > results/total.txt; do :; done' >/dev/null 2>&1 &"
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_the_agents_programs_can_neither_read_the_truth_nor_replace_the_check(
    client: AsyncEnvClient, forgery: str
) -> None:
    async with client.reset("cua-gym/report", view=View(encoding="none")) as episode:
        started = await episode.run_command(["sh", "-c", f"cd /tmp_workspace; {FORGERIES[forgery]}"])
        assert started.exit_code == 0, started
        with pytest.raises(EvaluatorFailed):
            await episode.evaluate()
