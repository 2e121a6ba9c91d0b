"""Forks of real machines over gRPC: groups, branches, and what forks share and do not share."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    Conflict,
    Done,
    EnvClient,
    Episode,
    Move,
    PoolExhausted,
    PressKeys,
    RunShell,
    Settle,
    TypeText,
    View,
    Wait,
)
from envd.hypervisor.qemu.processes import machine_pids
from tests.support.leftovers import machine_leftovers
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

TASK = "desktop/type-greeting"
NO_SETUP = "desktop/open-calculator"
#: Its setup, which opens the editor, takes 20 s of emulation. The second reset starts in the state after it.
FROZEN = "forks/greeting"
DOCUMENT = "/home/user/Documents/greeting.txt"
LONG_TIMEOUT = timedelta(minutes=10)
NO_PIXELS = View(encoding="none")
SAVE = (PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=1)))
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 2
capacity = 16
allow_guest_access = true
tools = ["shell"]

[pools.small]
image = "desktop"
size = 1
capacity = 3

[hypervisor]
template_dir = "{template_dir}"

[tasks]
suites = ["{suite}"]
"""
SUITE = """\
suite: forks
tasks:
  - name: greeting
    level: 1
    instruction: Type a greeting and save it.
    freeze_setup: true
    setup:
      - {kind: write_file, path: /home/user/Documents/greeting.txt, text: ""}
      - {kind: open, path: /home/user/Documents/greeting.txt}
    checker: {kind: file_text, path: /home/user/Documents/greeting.txt, equals: "Hello, desktop!"}
    oracle:
      - [{type: "Hello, desktop!"}, {press: [ctrl, s]}, {wait: 1}]
      - [done]
"""


@pytest.fixture(scope="module")
def state_dir(module_dir: Path) -> Path:
    return module_dir / "s"


@pytest.fixture(scope="module")
def suite(module_dir: Path) -> Path:
    path = module_dir / "forks.yaml"
    path.write_text(SUITE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def address(state_dir: Path, template_dir: Path, suite: Path) -> Iterator[str]:
    with ServedDaemon(state_dir, CONFIG.format(template_dir=template_dir, suite=suite)) as served:
        yield served.wait_for(r"listening on (\S+)")
        assert served.end() == 0
    assert machine_leftovers(state_dir) == []
    assert list((state_dir / "captures").glob("*")) == []


@pytest.fixture
def client(address: str) -> Iterator[EnvClient]:
    with EnvClient(address) as client:
        yield client


def output_of(episode: Episode, *argv: str, as_root: bool = False) -> str:
    result = episode.run_command(argv, as_root=as_root)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().strip()


def document(episode: Episode) -> str:
    return episode.read_file(DOCUMENT).decode()


def wait_saved(episode: Episode, text: str) -> bool:
    """Let the guest run until its editor has saved `text`; under emulation that can be long after the step."""
    deadline_s = time.monotonic() + 300
    while document(episode) != text:
        if time.monotonic() > deadline_s:
            return False
        episode.observe(settle=Settle(min=timedelta(seconds=2), max=timedelta(seconds=2)), view=NO_PIXELS)
    return True


def test_the_members_of_a_group_start_in_one_state_and_diverge(client: EnvClient) -> None:
    with client.reset_group(TASK, size=3, pool="desktop", timeout=LONG_TIMEOUT) as episodes:
        assert len({episode.episode_id for episode in episodes}) == 3
        assert len({episode.group_id for episode in episodes}) == 1
        assert len({episode.origin for episode in episodes}) == 1
        assert len({episode.observation.frame_id for episode in episodes}) == 1
        assert len({episode.observation.data for episode in episodes}) == 1
        first, second, third = episodes
        first.step(TypeText("Hello, desktop!"), *SAVE)
        second.step(TypeText("Hello, world!"), *SAVE)
        assert wait_saved(first, "Hello, desktop!")
        assert wait_saved(second, "Hello, world!")
        assert document(third) == ""
        assert first.observe().frame_id != second.observe().frame_id
        assert third.observe().frame_id == third.origin.first_frame_id
        assert [episode.evaluate().score for episode in episodes] == [1.0, 0.0, 0.0]


def test_a_task_with_a_frozen_setup_starts_in_the_identical_state_again(client: EnvClient) -> None:
    with client.reset(FROZEN, pool="desktop", timeout=LONG_TIMEOUT) as episode:
        first = episode.origin
        episode.step(TypeText("Hello, desktop!"), *SAVE)
        assert wait_saved(episode, "Hello, desktop!")
        assert episode.evaluate().score == 1.0
    with client.reset(FROZEN, pool="desktop", timeout=LONG_TIMEOUT) as episode:
        # Running the setup again would give another state, with other times and process ids.
        assert episode.origin == first
        assert document(episode) == ""


def test_a_branch_within_typed_text_and_a_branch_of_that_branch(client: EnvClient) -> None:
    quiet = Settle(quiet=timedelta(milliseconds=500))
    with client.reset(FROZEN, pool="desktop", view=NO_PIXELS, timeout=LONG_TIMEOUT) as parent:
        parent.step(TypeText("Hello, "), settle=quiet)
        with client.fork(parent, count=1, view=NO_PIXELS, timeout=LONG_TIMEOUT) as (child,):
            assert (child.parent_episode_id, child.group_id) == (parent.episode_id, parent.group_id)
            assert child.step_count == parent.step_count == 1
            assert child.observation.frame_id == child.origin.first_frame_id
            child.step(TypeText("desk"), settle=quiet)
            with client.fork(child, count=2, view=NO_PIXELS, timeout=LONG_TIMEOUT) as (grandchild, other):
                assert grandchild.parent_episode_id == child.episode_id
                assert grandchild.origin == other.origin != child.origin
                for episode, rest in ((grandchild, "top!"), (other, "lamp"), (child, " chair"), (parent, "world")):
                    assert not any(episode.step(TypeText(rest), *SAVE, settle=quiet).errors)
                assert wait_saved(parent, "Hello, world")
                assert wait_saved(child, "Hello, desk chair")
                assert wait_saved(grandchild, "Hello, desktop!")
                assert wait_saved(other, "Hello, desklamp")
                grandchild.step(Done())
                scores = [episode.evaluate().score for episode in (parent, child, grandchild, other)]
                assert scores == [0.0, 0.0, 1.0, 0.0]


def test_a_fork_copies_the_shell_with_its_variables(client: EnvClient) -> None:
    def shell(episode: Episode, command: str) -> str:
        (result,) = episode.step(RunShell(command)).tool_results
        assert result is not None
        return result.output

    with client.reset(NO_SETUP, pool="desktop", view=NO_PIXELS, timeout=LONG_TIMEOUT) as parent:
        assert shell(parent, "cd /tmp; X=5; echo $X") == "5\n"
        with client.fork(parent, count=1) as (copy,):
            assert shell(copy, "echo $X; pwd; X=6") == "5\n/tmp\n"
            assert shell(copy, "echo $X") == "6\n"
        assert shell(parent, "echo $X") == "5\n"


def test_a_fork_with_an_old_step_index_is_rejected_and_the_parent_continues(address: str) -> None:
    async def run() -> None:
        async with AsyncEnvClient(address) as client, client.reset(NO_SETUP, pool="desktop", view=NO_PIXELS) as parent:
            await parent.step(Move(100, 100))
            parent.step_count = 0  # A caller with a wrong count.
            with pytest.raises(Conflict):
                async with client.fork(parent, count=1):
                    pass
            parent.step_count = 1
            assert (await parent.step(Move(200, 100))).step_count == 2

    asyncio.run(run())


def test_a_paused_episode_can_be_branched_repeatedly(address: str) -> None:
    async def run() -> None:
        async with (
            AsyncEnvClient(address) as client,
            client.reset(NO_SETUP, pool="desktop", view=NO_PIXELS, timeout=LONG_TIMEOUT) as parent,
        ):
            await parent.step(Move(300, 300))
            for _ in range(3):
                # It stays paused between the branches.
                async with client.fork(parent, count=1, view=NO_PIXELS, timeout=LONG_TIMEOUT) as copies:
                    assert (await copies[0].step(Move(100, 100), timeout=LONG_TIMEOUT)).step_count == 2
            assert (await parent.step(Move(200, 100), timeout=LONG_TIMEOUT)).step_count == 2

    asyncio.run(run())


def test_a_fork_has_its_own_clock_machine_id_and_random_numbers(client: EnvClient) -> None:
    before_s = time.time()
    with client.reset_group(NO_SETUP, size=2, pool="desktop", view=NO_PIXELS, timeout=LONG_TIMEOUT) as episodes:
        seen = []
        for episode in episodes:
            date_s = float(output_of(episode, "date", "+%s.%N"))
            assert before_s - 1 < date_s < time.time() + 1, "the clock still has the template's time"
            assert "crng reseeded due to virtual machine fork" in output_of(episode, "dmesg", as_root=True)
            random = output_of(episode, "python3", "-c", "import os; print(os.urandom(16).hex())")
            seen.append((output_of(episode, "cat", "/etc/machine-id"), random, output_of(episode, "hostname")))
        (one_id, one_random, one_host), (other_id, other_random, other_host) = seen
        assert one_id != other_id
        assert len(one_id) == 32
        assert one_random != other_random
        assert one_host == other_host, "prompts show it, and the members of a group must look equal"


def test_a_machine_is_paused_between_calls(client: EnvClient, state_dir: Path) -> None:
    with client.reset(NO_SETUP, pool="desktop", view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode:
        episode.step(Move(300, 300))
        began_s = time.monotonic()
        before_s = float(output_of(episode, "cut", "-d ", "-f1", "/proc/uptime"))
        paused_s = time.monotonic()
        time.sleep(4)
        resumed_s = time.monotonic()
        after_s = float(output_of(episode, "cut", "-d ", "-f1", "/proc/uptime"))
        ran_s = paused_s - began_s + time.monotonic() - resumed_s
        assert after_s - before_s <= ran_s, "the guest ran between calls"
    assert machine_pids(state_dir)


def test_resets_beyond_the_idle_machines_fork_new_ones_and_beyond_the_capacity_wait(client: EnvClient) -> None:
    pool = {pool.name: pool for pool in client.list_pools()}["small"]
    assert (pool.capacity, pool.waiting_count) == (3, 0)
    with (
        client.reset(NO_SETUP, pool="small", view=NO_PIXELS, timeout=LONG_TIMEOUT),
        client.reset(NO_SETUP, pool="small", view=NO_PIXELS, timeout=LONG_TIMEOUT),
        client.reset(NO_SETUP, pool="small", view=NO_PIXELS, timeout=LONG_TIMEOUT),
        pytest.raises(PoolExhausted, match="'small'"),
        client.reset(NO_SETUP, pool="small", view=NO_PIXELS, timeout=timedelta(seconds=2)),
    ):
        pass


def test_a_pool_of_16_serves_16_episodes_at_once(address: str) -> None:
    async def play(client: AsyncEnvClient, number: int) -> str:
        async with client.reset(NO_SETUP, pool="desktop", view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode:
            await ready.wait()
            for step in range(2):
                await episode.step(Move(100 + 10 * number, 100 + 10 * step), view=NO_PIXELS, timeout=LONG_TIMEOUT)
            return await note(episode, f"episode {number}")

    async def note(episode: AsyncEpisode, text: str) -> str:
        await episode.write_file("/home/user/note.txt", text.encode(), timeout=LONG_TIMEOUT)
        return (await episode.read_file("/home/user/note.txt", timeout=LONG_TIMEOUT)).decode()

    async def run() -> list[str]:
        async with AsyncEnvClient(address) as client:
            playing = [asyncio.create_task(play(client, number)) for number in range(16)]
            while (await pool_of(client)) < 16:
                assert not any(task.done() for task in playing), [task for task in playing if task.done()]
                await asyncio.sleep(0.2)
            ready.set()
            return await asyncio.gather(*playing)

    async def pool_of(client: AsyncEnvClient) -> int:
        return {pool.name: pool.leased_count for pool in await client.list_pools()}["desktop"]

    ready = asyncio.Event()
    assert asyncio.run(run()) == [f"episode {number}" for number in range(16)]


def test_a_damaged_template_is_reported_and_a_new_one_booted(
    module_dir: Path, template_dir: Path, suite: Path, daemons: ExitStack
) -> None:
    """Needs the template used or made by this module's daemon."""
    copy = module_dir / "t"
    key = max(template_dir.glob("*/snapshot.json"), key=lambda path: path.stat().st_mtime).parent.name
    shutil.copytree(template_dir / key, copy / key)
    # With other memory, in a separate file, because a damaged template's files are removed.
    manifest = copy / key / "snapshot.json"
    (copy / "memory.ram").write_bytes(b"\1" * 4096)
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "memory_path": str(copy / "memory.ram")}))
    served = daemons.enter_context(ServedDaemon(module_dir / "c", CONFIG.format(template_dir=copy, suite=suite)))
    served.wait_for(r"pool desktop: (preparing) the template")
    deadline_s = time.monotonic() + 60
    while "the stored template is not usable" not in (log := served.log_file.read_text()):
        assert time.monotonic() < deadline_s, log
        time.sleep(0.2)
    assert f"template {copy / key}" in log
    assert served.end() == 0
    assert not manifest.exists()
    assert machine_leftovers(module_dir / "c") == []
