"""`envd tasks attack --envd`: running daemons share the mutants, and one of them is killed."""

import json
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from cuaenv.client import AsyncEnvClient
from envd.authoring import desktops
from envd.authoring.attack.mutants import Mutant
from envd.authoring.attack.playing import Attack, attack
from envd.authoring.desktops import ScriptHosts, running_desktops
from envd.base.config import Config, TasksConfig
from envd.daemon.suites import load_tasks
from envd.tasks.model import Task
from tests.support.command import CommandOutput, run_envd
from tests.support.containers import desktop_image
from tests.support.served import ServedDaemon

TASK = """
  - name: {name}
    level: 1
    instruction: Write it.
    checker: {{kind: file_text, path: /home/user/note.txt, equals: Room 12}}
    oracle: [[{{click: {{x: 379, y: 311}}}}, {{type: Room 12}}], [{{press: [ctrl, s]}}], [done]]
"""
CONTAINERS = """
[hypervisor]
uri = "oci:"
[pools.desktop]
size = 1
capacity = 4
allow_guest_access = true
"""
SUITE = "version: 1\nsuite: mine\ntasks:" + "".join(TASK.format(name=name) for name in ("one", "two", "three"))


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(SUITE, encoding="utf-8")
    return path


def serve(suite: Path, name: str) -> ServedDaemon:
    return ServedDaemon(suite.parent / name, "", "--hypervisor", "fake", "--pool", "4", "--tasks", str(suite))


@pytest.fixture
def served(suite: Path) -> Iterator[dict[str, ServedDaemon]]:
    """Return two daemons by their addresses."""
    with serve(suite, "left") as left, serve(suite, "right") as right:
        yield {each.wait_for(r"listening on (\S+)"): each for each in (left, right)}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the daemon of each episode that is played is added."""
    seen: list[str] = []
    original = ScriptHosts.while_up

    def noted(self: ScriptHosts, host: str) -> AbstractAsyncContextManager[None]:
        seen.append(host)
        return original(self, host)

    monkeypatch.setattr(ScriptHosts, "while_up", noted)
    return seen


def run_attack(suite: Path, *arguments: str) -> CommandOutput:
    """Attack two of the tasks."""
    places = [f"--{name}={suite.parent / name}" for name in ("cache-dir", "out", "state-dir")]
    kinds = [word for kind in ("almost", "repeated") for word in ("--family", kind)]
    options = ["--tasks", str(suite), "--sample", "2", "--json", *kinds, *places]
    return run_envd("tasks", "attack", "mine/one", "mine/two", *options, *arguments)


def results(suite: Path) -> dict[str, float]:
    """Return the scores by digest; each mutant has one line."""
    lines = (suite.parent / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    found = {each["digest"]: each["score"] for each in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def test_running_daemons_share_the_mutants_and_play_none_twice(
    suite: Path, served: dict[str, ServedDaemon], hosts: list[str]
) -> None:
    addresses = [word for address in served for word in ("--envd", address)]
    run_attack(suite, "--jobs", "4", *addresses)
    assert set(hosts) == set(served)
    shared = results(suite)
    assert set(shared.values()) == {0.0, 1.0}
    hosts.clear()
    # A command's own daemon finds the same mutants played.
    again = run_attack(suite, "--hypervisor", "fake")
    assert f"has {len(shared)} results; their mutants are not played again" in again.err
    assert (hosts, results(suite)) == ([], shared)


async def attack_and_kill(
    served: dict[str, ServedDaemon], tasks: Sequence[Task], hosts: list[str], *, jobs: int, after: int
) -> int:
    """Play the mutants of first steps, and kill the first daemon after some results; return how many were played."""
    found: list[Attack] = []
    planned: set[str] = set()
    victim = next(iter(served))

    def is_wanted(mutant: Mutant, digest: str) -> bool:
        if mutant.name.startswith("step 1:"):
            planned.add(digest)
        return digest in planned

    def on_result(result: Attack) -> None:
        found.append(result)
        if len(found) == after:
            assert victim in hosts
            served[victim].send(signal.SIGKILL)

    await attack(
        running_desktops(lambda: AsyncEnvClient(list(served), token="")),
        tasks,
        parallel_count=jobs,
        extra={},
        is_wanted=is_wanted,
        on_result=on_result,
    )
    assert served[victim].wait() == -signal.SIGKILL
    assert sorted(each.digest for each in found) == sorted(planned)
    assert {each.score for each in found} == {0.0, 1.0}
    return len(found)


async def test_a_daemon_that_is_killed_gives_its_mutants_to_the_other(
    suite: Path, served: dict[str, ServedDaemon], hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desktops, "_MAX_DOWN_S", 0.5)
    tasks = load_tasks(Config(tasks=TasksConfig(suites=(str(suite),)))).select(["mine/one", "mine/two"])
    played_count = await attack_and_kill(served, tasks, hosts, jobs=8, after=5)
    # What the daemon was playing was begun twice: a fork or the machine that it was copied from.
    assert len(hosts) > played_count + len(tasks)


@pytest.mark.long
@pytest.mark.native
@pytest.mark.timeout(900)
async def test_a_killed_daemon_of_containers_gives_its_mutants_to_the_other(hosts: list[str]) -> None:
    desktop_image()
    tasks = load_tasks(Config()).select(["desktop/type-greeting", "desktop/open-calculator"])
    with (
        tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as directory,
        ServedDaemon(Path(directory) / "left", CONTAINERS) as left,
        ServedDaemon(Path(directory) / "right", CONTAINERS) as right,
    ):
        served = {each.wait_for(r"listening on (\S+)"): each for each in (left, right)}
        await attack_and_kill(served, tasks, hosts, jobs=3, after=3)


def test_a_daemon_of_another_release_and_an_image_are_refused(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(suite, "left") as left:
        address = left.wait_for(r"listening on (\S+)")
        done = run_attack(suite, "--envd", address, "--image", "office")
        assert (done.status, "--image and --envd" in done.err) == (2, True)
        monkeypatch.setattr(desktops, "envd_version", lambda: "0.0.1")
        done = run_attack(suite, "--envd", address)
    assert (done.status, "whose checkers may differ from those of 0.0.1" in done.err) == (2, True)


def test_daemons_that_do_not_respond_are_named(suite: Path) -> None:
    done = run_attack(suite, "--envd", "127.0.0.1:1")
    assert (done.status, "daemon 127.0.0.1:1: " in done.err) == (1, True)
