"""Every Python example of the README and of the users' pages runs against drawn desktops, and their command lines do.

The examples of docs/adapters.md need their frameworks and run in `tests/adapters`, that of docs/gateway.md in
`tests/contract/test_trainer_gateway.py`, those of docs/make-it-yours.md in `tests/e2e/test_packages.py`.
An example that cannot run is marked on its page, with the reason.
"""

import ast
import asyncio
import re
import shlex
from collections.abc import Iterator
from inspect import CO_COROUTINE
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import envd.cli.app
import trainer.cli.app
from cuaenv.client import AsyncEnvClient
from envd.authoring.attack.mutants import mutants_of
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from envd.tasks.basis import judged_digest
from envd.tasks.catalogue import TaskCatalogue
from tests.support.command import run_envd
from tests.support.server import serve_fake
from tests.unit.test_documented_commands import LINES

ROOT = Path(__file__).parents[2]
#: In the order in which a reader meets them: later ones use names of earlier ones.
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/tutorials/first-episode.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "client",
            "checkpoints",
            "people",
            "agent",
            "rewards",
            "train",
            "train-faults",
            "data",
            "suite",
            "compat",
            "osworld",
            "web",
        )
    ),
]
MARK = "<!-- not run by the tests: it needs "
#: Tasks and hosts of the examples that drawn desktops do not have.
REPLACED = {"desktop/type-greeting": "fake/count-to-five", "desktop/delete-line": "fake/count-to-five"}
TARGET = re.compile(r'"(?:127\.0\.0\.1|gpu-host-\d):50051(?:,gpu-host-\d:50051)*"')


def examples(page: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line of each example of a page, its code, and whether it is marked."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start()].rstrip().splitlines()
        yield text[: match.start()].count("\n") + 2, match[1], before[-1].startswith(MARK)


def execute(code: str, name: str, names: dict[str, Any]) -> None:
    """Run code with `await` at its top level."""
    tree = ast.parse(code)
    compiled = compile(tree, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    run = FunctionType(compiled, names)
    if compiled.co_flags & CO_COROUTINE:
        asyncio.run(run())
    else:
        run()


def test_every_page_with_examples_is_run() -> None:
    with_examples = {path for path in (ROOT / "docs").rglob("*.md") if list(examples(path))}
    names = ("adapters.md", "gateway.md", "make-it-yours.md")
    elsewhere = {ROOT / "docs" / name for name in names}
    assert with_examples - set(PAGES) == elsewhere
    assert sum(is_marked for page in PAGES for _, _, is_marked in examples(page)) == 6


async def test_the_documented_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replays.jsonl").touch()
    names: dict[str, Any] = {"__name__": "example"}
    run_count = 0
    store = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with serve_fake(size=8, capacity=16, checkpoints=store) as server:
        for page in PAGES:
            for line, example, is_marked in examples(page):
                if is_marked:
                    continue
                code = TARGET.sub(f'"{server.address}"', example)
                for task, drawn in REPLACED.items():
                    code = code.replace(task, drawn)
                await asyncio.to_thread(execute, code, f"{page.name}:{line}", names)
                run_count += 1
    assert run_count > 8


#: Documented command lines that need neither files nor a machine.
RUNS = re.compile(
    r"envd (tasks (list|show)|top|checkpoints list|episodes (list|show)|tokens new|certs certs)\b(?!.*\.yaml)"
    r"|trainer (recipe list|play .*--by null|eval --help)"
)


async def test_the_documented_command_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = list(dict.fromkeys(line for _, line in LINES if RUNS.match(line) and "--envd" not in line))
    words_of = {" ".join(line.split()[:3]) for line in lines}
    assert {"envd episodes show", "envd tasks show", "trainer play desktop/type-greeting", "envd top"} <= words_of
    store = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with serve_fake(size=2, capacity=4, checkpoints=store) as server, AsyncEnvClient(server.address) as client:
        episode = await client.open("fake/enable")
        monkeypatch.setenv("ENVD_TARGET", server.address)
        for line in lines:
            program, *words = shlex.split(re.sub(r"\bep-\w+", episode.episode_id, line))
            if program == "trainer":
                words = [REPLACED.get(word, word) for word in words]
            if words[:2] == ["tokens", "new"] and not words[2:]:
                words.append("trainer-a")
            app = {"envd": envd.cli.app.app, "trainer": trainer.cli.app.app}[program]
            result = await asyncio.to_thread(CliRunner().invoke, app, words)
            assert result.exit_code == 0, f"{line}: {result.output}"
            assert result.output.strip(), line


def test_the_tasks_of_the_tutorial_are_sound(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorials/own-task.md").read_text(encoding="utf-8")
    files = re.findall(r"```yaml\n(suite: (\w+)\n.*?)```", text, re.DOTALL)
    assert [suite for _, suite in files] == ["mine", "tea"]
    verify = ["tasks", "verify", "mine/count", "tea/order", "--hypervisor", "fake"]
    for content, suite in files:
        path = tmp_path / f"{suite}.yaml"
        path.write_text(content, encoding="utf-8")
        verify += ["--tasks", str(path)]
    done = run_envd(*verify, "--state-dir", str(tmp_path / "state"), "--json")
    assert done.status == 0, done.err
    assert '"oracle_ok": 2,' in done.out
    [order] = TaskCatalogue.load([tmp_path / "tea.yaml"], include_builtin=False).list()
    mutants = {each.name: each.digest(judged_digest(order)) for each in mutants_of(order)}
    [verdict] = yaml.safe_load(text.rpartition("```yaml\n")[2].partition("```")[0])
    assert mutants[verdict["mutant"]] == verdict["digest"]
