"""More open episodes than machines: idle ones are parked on the disk, and continue at their next call."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.actions import Action
from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    CheckpointStoreFull,
    Click,
    Done,
    EpisodeNotFound,
    GroupTooLarge,
    KeyDown,
    MachineLost,
    PoolExhausted,
    TypeText,
    View,
)
from envd.base import errors
from envd.base.clock import Clock, wait_until
from envd.base.config import CheckpointsConfig
from envd.desktop.desktop import Desktop
from envd.episodes.checkpoints import parking, states
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.types import ResetCommand, StepCommand
from tests.e2e.test_fake_restart import OffsetClock
from tests.support.clock import until
from tests.support.faulty import FakeHost
from tests.support.server import FakeServer, serve_fake, served_client

TASK = "fake/save-note"
EDITOR, SAVE = Click(379, 311), Click(82, 86)
LINE = "Hello, fake desktop!"


@pytest.fixture(autouse=True)
def _parks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_MIN_IDLE_S", 0.0)
    monkeypatch.setattr(parking, "_POLL_S", 0.01)


def store_in(directory: Path) -> CheckpointStore:
    settings = CheckpointsConfig(limit_gib=1000, run_limit_gib=1000)
    return CheckpointStore(
        directory / "parked", settings=settings, reserve_bytes=0, owners=lambda: ("",), survives_power_failure=False
    )


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncEnvClient]]:
    """Serve a pool that may have 12 episodes and 3 machines; afterwards no state is left."""
    usual = {"size": 1, "capacity": 12, "resident": 3, "parked": store_in(directory)}
    async with served_client(**{**usual, **options}) as (server, client):
        yield server, client
        for info in server.service.list_episodes():
            await server.service.close(info.episode_id)
        await until(lambda: not stored(directory))
        await until(lambda: not server.hypervisor.host.captures)


def stored(directory: Path) -> list[Path]:
    return list(directory.glob("parked/*"))


async def test_more_episodes_than_machines_are_solved(tmp_path: Path) -> None:
    """Every episode scores as if it had been in memory all the time."""
    async with served(tmp_path) as (server, client):
        episodes = [await client.open(TASK) for _ in range(5)]
        assert server.pool.statistics().parked_count >= 2
        for action in (EDITOR, TypeText(LINE), SAVE):
            for episode in episodes:
                await episode.step(action)
                assert server.pool.statistics().leased_count <= 3
        results = [await episode.evaluate() for episode in episodes]
        assert [result.score for result in results] == [1.0] * 5
        for episode in episodes:
            await episode.close()
        await until(lambda: not stored(tmp_path))
        assert server.pool.statistics().parked_count == 0


async def opened(client: AsyncEnvClient, count: int) -> list[AsyncEpisode]:
    return [await client.open(TASK) for _ in range(count)]


async def parked(server: FakeServer, client: AsyncEnvClient) -> AsyncEpisode:
    """Return an episode that is parked."""
    episode = await client.open(TASK)
    await park(server, client, episode)
    return episode


async def park(server: FakeServer, client: AsyncEnvClient, episode: AsyncEpisode) -> None:
    """Open others until an episode is parked, and close them."""
    others = []
    while not is_parked(server, episode):
        others.append(await client.open(TASK))
        await asyncio.sleep(0.1)
    for other in others:
        await other.close()


def is_parked(server: FakeServer, episode: AsyncEpisode) -> bool:
    return server.service.machine_ids()[episode.episode_id].startswith("parked-")


def command(episode_id: str, index: int, action: Action) -> StepCommand:
    return StepCommand(
        request_id=f"step-{index}", episode_id=episode_id, step_index=index, actions=(action,), fingerprint=b"f"
    )


async def test_an_agent_that_thinks_is_parked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_MIN_IDLE_S", 3600.0)
    async with (
        served(tmp_path, size=0, resident=2) as (server, client),
        AsyncEnvClient(server.address, expects_idle=True) as thinking,
    ):
        first, second = await client.open(TASK), await thinking.open(TASK)
        await second.step(EDITOR)
        await first.step(EDITOR)
        await client.open(TASK)
        (parked,) = [info for info in await client.list_episodes() if info.is_parked]
        assert parked.episode_id == second.episode_id
        (pool,) = await client.list_pools()
        assert (pool.parked_count, pool.resident_count, pool.capacity) == (1, 2, 12)
        await second.step(SAVE, expects_idle=False)


async def test_calls_of_all_episodes_at_once_take_turns(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        episodes = await opened(client, 5)
        for action in (EDITOR, TypeText(LINE), SAVE):
            results = await asyncio.gather(*(episode.step(action) for episode in episodes))
            assert not any(result.errors for result in results)
        scores = await asyncio.gather(*(episode.evaluate() for episode in episodes))
        assert {score.score for score in scores} == {1.0}
        assert {episode.step_count for episode in episodes} == {3}


async def test_a_parked_episode_shows_its_last_screen_and_stays_parked(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client):
        first = await client.open(TASK)
        seen = (await first.step(EDITOR)).observation.frame_id
        await park(server, client, first)
        assert (await first.observe()).frame_id == seen
        assert is_parked(server, first)
        # A refresh asks the guest.
        assert (await first.observe(refresh=True)).frame_id == seen
        assert not is_parked(server, first)


async def test_a_call_that_comes_while_an_episode_is_parked_finds_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is abandoned, and leaves no state."""
    started, go = asyncio.Event(), asyncio.Event()
    write_state = states.write_state

    async def slow(*arguments: Any, **options: Any) -> Any:
        started.set()
        await go.wait()
        return await write_state(*arguments, **options)

    monkeypatch.setattr(parking, "write_state", slow)
    async with served(tmp_path, resident=2) as (server, client):
        first = await client.open(TASK)
        machine_id = server.service.machine_ids()[first.episode_id]
        opening = asyncio.create_task(client.open(TASK))
        await started.wait()
        started.clear()
        assert not (await first.step(EDITOR)).errors
        assert server.service.machine_ids()[first.episode_id] == machine_id
        go.set()
        await opening
        await until(lambda: server.pool.statistics().parked_count == 1)
        await until(lambda: len(stored(tmp_path)) == 1)


async def test_a_closed_and_an_expired_episode_leave_no_state(tmp_path: Path) -> None:
    clock = OffsetClock()
    async with served(tmp_path, clock=clock) as (server, client):
        first = await parked(server, client)
        await first.close()
        await until(lambda: not stored(tmp_path))
        second = await client.open(TASK, lease_ttl=timedelta(seconds=10))
        await park(server, client, second)
        clock.offset_s += 4000
        server.service._registry.changes.notify()
        await until(lambda: not server.service.list_episodes())
        await until(lambda: not stored(tmp_path))
        with pytest.raises(EpisodeNotFound, match="lease expired"):
            await second.step(EDITOR)


@pytest.mark.parametrize("outlives", [False, True])
async def test_parked_episodes_outlive_their_daemon(tmp_path: Path, *, outlives: bool) -> None:
    """Machines that do not outlive it are lost; parked episodes continue either way."""
    options: dict[str, Any] = {"size": 1, "capacity": 12, "resident": 3, "database": tmp_path / "envd.db"}
    host = FakeHost()
    async with serve_fake(**options, parked=store_in(tmp_path), host=host) as server:
        groups = [await server.service.reset(ResetCommand(request_id=f"r{i}", task_id=TASK)) for i in range(5)]
        for episode_id in (group.episodes[0].episode_id for group in groups):
            await server.service.step(command(episode_id, 0, EDITOR))
        await until(lambda: server.pool.statistics().parked_count >= 3)
        machines = server.service.machine_ids()
        await server.kill()
        # A killed daemon deletes nothing; this one does as its block ends.
        shutil.copytree(tmp_path / "parked", tmp_path / "left")
    shutil.rmtree(tmp_path / "parked")
    (tmp_path / "left").rename(tmp_path / "parked")
    # Of a daemon that was killed while it wrote.
    (tmp_path / "parked" / "ckpt-0123456789abcdef").mkdir()
    async with served(tmp_path, database=options["database"], host=host if outlives else FakeHost()) as (server, _):
        for episode_id, machine_id in machines.items():
            if not (outlives or machine_id.startswith("parked-")):
                with pytest.raises(errors.MachineLost):
                    await server.service.step(command(episode_id, 1, TypeText(LINE)))
                continue
            await server.service.step(command(episode_id, 1, TypeText(LINE)))
            # What was done is not done again.
            assert (await server.service.step(command(episode_id, 0, EDITOR))).replayed
            await server.service.step(command(episode_id, 2, SAVE))
            result = await server.service.evaluate(episode_id, request_id="e", fingerprint=b"f")
            assert result.score == 1.0


async def test_a_full_disk_parks_no_episode_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    store.reserve_bytes = 1 << 62
    monkeypatch.setattr(parking, "_FAILED_S", 0.05)
    async with served(tmp_path, parked=store) as (server, client):
        episodes = await opened(client, 3)
        with pytest.raises(PoolExhausted):
            await client.open(TASK, timeout=timedelta(seconds=1.0))
        labels = {"pool": "fake", "operation": "park", "reason": "CHECKPOINT_STORE_FULL"}
        registry = server.metrics.registry
        assert registry.get_sample_value("envd_episode_failures_total", labels)
        for episode in episodes:
            assert not (await episode.step(EDITOR)).errors
        assert server.pool.statistics().parked_count == 0
        store.reserve_bytes = 0
        await opened(client, 3)
        assert server.pool.statistics().parked_count >= 3


async def test_a_damaged_state_voids_its_episode_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client):
        first = await parked(server, client)
        # Closed ones that were parked too may still be there.
        directory = tmp_path / "parked" / server.service.machine_ids()[first.episode_id].removeprefix("parked-")
        next(path for path in directory.iterdir() if path.name != "checkpoint.json").write_bytes(b"x")
        with pytest.raises(MachineLost, match="parked state"):
            await first.step(EDITOR)
        with pytest.raises(MachineLost):
            await first.evaluate()
        await until(lambda: server.pool.statistics().parked_count == 0)
        assert not [info for info in await client.list_episodes() if info.is_parked]


async def test_a_machine_that_cannot_be_copied_stays(tmp_path: Path) -> None:
    async with served(tmp_path, size=0, resident=1) as (server, client):
        held = await client.open(TASK)
        await held.step(KeyDown("shift"))
        server.hypervisor.machines[server.service.machine_ids()[held.episode_id]].inject(unforkable="it has a lock")
        with pytest.raises(PoolExhausted):
            await client.open(TASK, timeout=timedelta(seconds=0.5))
        assert not is_parked(server, held)
        assert not (await held.step(EDITOR)).errors


async def test_an_episode_in_the_hands_of_a_person_stays(tmp_path: Path) -> None:
    async with served(tmp_path, size=0, resident=1) as (server, client):
        episode = await client.open(TASK)
        server.service.take_control(episode.episode_id, control_id="c", holder="")
        with pytest.raises(PoolExhausted):
            await client.open(TASK, timeout=timedelta(seconds=0.5))
        await server.service.release_control(episode.episode_id, control_id="c")
        await park(server, client, episode)
        # And a person can take one that is parked.
        server.service.take_control(episode.episode_id, control_id="c", holder="")
        await server.service.act(episode.episode_id, control_id="c", actions=[EDITOR])
        assert not is_parked(server, episode)


async def test_an_episode_with_a_forwarded_port_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(2))
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(echo, "127.0.0.1", 0)
    monkeypatch.setattr(
        Desktop, "open_port", lambda *_: asyncio.open_connection(*listening.sockets[0].getsockname()[:2])
    )
    async with listening, served(tmp_path, size=0, resident=1) as (server, client):
        episode = await client.open(TASK)
        await park(server, client, episode)
        # Opening one takes a machine.
        async with server.service.connect_port(episode.episode_id, 80, idle_timeout_s=60.0) as connection:
            assert not is_parked(server, episode)
            with pytest.raises(PoolExhausted):
                await client.open(TASK, timeout=timedelta(seconds=0.5))
            await connection.write(b"hi")
            assert await connection.read() == b"hi"
        await park(server, client, episode)


async def test_all_machines_in_calls_refuse_a_parked_episode_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "_WAIT_S", 0.2)
    async with served(tmp_path, size=0, resident=1) as (server, client):
        first, second = await opened(client, 2)
        await until(lambda: is_parked(server, first))
        busy = server.service.find(second.episode_id)
        assert busy is not None
        # As a call has it: until it ends, the machine cannot be taken.
        async with busy.lock:
            with pytest.raises(errors.PoolExhausted, match="in calls"):
                await server.service.step(command(first.episode_id, 0, EDITOR))
        monkeypatch.undo()
        # The same request: nothing was done.
        result = await server.service.step(command(first.episode_id, 0, EDITOR))
        assert (result.replayed, result.episode.progress.step_count) == (False, 1)


async def test_a_call_whose_caller_is_gone_gives_up_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "GRACE_S", 0.2)
    async with served(tmp_path, size=0, resident=1) as (server, client):
        first, second = await opened(client, 2)
        await until(lambda: is_parked(server, first))
        busy = server.service.find(second.episode_id)
        assert busy is not None
        request = command(first.episode_id, 0, EDITOR)
        async with busy.lock:
            calls = [
                asyncio.create_task(server.service.step(request)),
                asyncio.create_task(first.observe(refresh=True)),
            ]
            (line,) = server.service._parking._lines.values()
            await until(lambda: line.waiting_count == 1)
            await asyncio.sleep(0.5)
            assert line.waiting_count == 1
            (running,) = (task for task in asyncio.all_tasks() if task.get_name().endswith(f" {request.request_id}"))
            for call in calls:
                call.cancel()
            await until(lambda: line.waiting_count == 0)
            # A retry before the call has ended would join it, and get its refusal.
            await asyncio.wait({running})
        # The same request: nothing was done.
        result = await server.service.step(request)
        assert (result.replayed, result.episode.progress.step_count) == (False, 1)


async def test_capacity_bounds_the_open_episodes(tmp_path: Path) -> None:
    async with served(tmp_path, capacity=5) as (_, client):
        episodes = await opened(client, 5)
        with pytest.raises(PoolExhausted):
            await client.open(TASK, timeout=timedelta(seconds=0.5))
        await episodes[0].close()
        await client.open(TASK)


async def test_forks_checkpoints_and_rollbacks_of_a_parked_episode(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with served(tmp_path, checkpoints=checkpoints, resident=4) as (server, client):
        first = await client.open(TASK)
        await first.step(EDITOR)
        await park(server, client, first)
        checkpoint = await first.checkpoint()
        assert checkpoint.step_count == 1
        await first.step(TypeText("a mistake"))
        await park(server, client, first)
        await first.rollback(checkpoint)
        async with client.fork(first, count=1) as (copy,):
            for episode in (first, copy):
                await episode.step(TypeText(LINE))
                await episode.step(SAVE)
                assert (await episode.evaluate()).score == 1.0


async def test_episodes_that_begin_in_a_checkpoint_are_parked_like_others(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with served(tmp_path, checkpoints=checkpoints) as (server, client):
        async with client.reset(TASK) as first:
            await first.step(EDITOR)
            checkpoint = await first.checkpoint()
        episodes = [await client.open(checkpoint) for _ in range(5)]
        assert server.pool.statistics().parked_count >= 2
        lines = [LINE if index % 2 else f"{LINE} Not {index}" for index in range(5)]
        for line, episode in zip(lines, episodes, strict=True):
            await episode.step(TypeText(line))
        for episode in episodes:
            await episode.step(SAVE)
        scores = [(await episode.evaluate()).score for episode in episodes]
        assert scores == [float(line == LINE) for line in lines]


async def test_what_is_known_of_a_parked_episode_takes_no_machine(tmp_path: Path) -> None:
    """A score that was recorded, and the refusal of a step after the end."""
    async with served(tmp_path) as (server, client):
        episode = await client.open(TASK)
        for action in (EDITOR, TypeText(LINE), SAVE):
            await episode.step(action)
        assert (await episode.evaluate()).score == 1.0
        await park(server, client, episode)
        assert (await episode.evaluate()).score == 1.0
        with pytest.raises(errors.EpisodeEnded):
            await server.service.step(command(episode.episode_id, 3, EDITOR))
        assert is_parked(server, episode)
        # What is not known needs it.
        ended = await client.open(TASK)
        await ended.step(Done())
        await park(server, client, ended)
        assert (await ended.evaluate()).score == 0.0
        assert not is_parked(server, ended)


@pytest.mark.parametrize("task_id", ["fake/save-note", "fake/append-line"])
async def test_a_group_larger_than_all_machines_begins_in_one_state(tmp_path: Path, task_id: str) -> None:
    checkpoints = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    view = View(a11y_tree=True)
    async with served(tmp_path, checkpoints=checkpoints) as (server, client):
        async with client.reset_group(task_id, size=5, view=view) as group:
            assert {episode.observation.frame_id for episode in group} == {group[0].observation.frame_id}
            assert {episode.observation.a11y_tree for episode in group} == {group[0].observation.a11y_tree}
            assert group[0].observation.a11y_tree
            assert server.pool.statistics().leased_count <= 3
            results = await asyncio.gather(*(episode.step(EDITOR) for episode in group))
            assert len({result.observation.frame_id for result in results}) == 1
            checkpoint = await group[4].checkpoint()
        async with client.reset_group(checkpoint, size=4) as group:
            assert {episode.step_count for episode in group} == {1}
            await asyncio.gather(*(episode.step(TypeText(LINE)) for episode in group))
            assert len({episode.observation.frame_id for episode in group}) == 1
        with pytest.raises(GroupTooLarge, match="at most 12 open episodes"):
            await client.reset_group(task_id, size=13)


async def test_a_group_whose_copies_cannot_be_stored_is_refused_whole(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.reserve_bytes = 1 << 62
    async with served(tmp_path, parked=store) as (server, client):
        with pytest.raises(CheckpointStoreFull):
            await client.reset_group(TASK, size=8)
        await until(lambda: server.pool.statistics().leased_count == 0)
        assert not server.service.list_episodes()


async def step_until(done: asyncio.Event, episode: AsyncEpisode, *, count: int, pause_s: float = 0.0) -> None:
    """Step until others have what they waited for."""
    for _ in range(count):
        await episode.step(EDITOR)
        if done.is_set():
            return
        await asyncio.sleep(pause_s)
    raise AssertionError("the others waited until the steps ended")


async def test_a_group_is_not_starved_by_steps_that_take_every_machine(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        episodes, done = [await client.open(TASK, max_steps=300) for _ in range(8)], asyncio.Event()
        stepping = [asyncio.create_task(step_until(done, episode, count=250, pause_s=0.1)) for episode in episodes]
        await asyncio.sleep(0.5)
        group = await client.reset_group(TASK, size=4, timeout=timedelta(seconds=20))
        assert len(group) == 4
        done.set()
        await asyncio.gather(*stepping)


async def test_a_new_episode_does_not_wait_for_the_end_of_those_that_are_never_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "_MIN_IDLE_S", 3600.0)
    monkeypatch.setattr(parking, "_PATIENCE_S", 0.2)
    async with served(tmp_path, size=0, resident=2) as (_, client):
        episodes, done = [await client.open(TASK, max_steps=1000) for _ in range(2)], asyncio.Event()
        stepping = [asyncio.create_task(step_until(done, episode, count=1000)) for episode in episodes]
        new = await client.open(TASK, timeout=timedelta(seconds=60))
        await new.step(EDITOR)
        done.set()
        await asyncio.gather(*stepping)


async def test_episodes_that_are_never_idle_share_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that comes at once does not keep its episode in memory while others wait, and finds its state."""
    monkeypatch.setattr(parking, "_PATIENCE_S", 0.2)
    async with served(tmp_path, size=0, resident=2) as (_, client):
        episodes, done = await opened(client, 5), asyncio.Event()
        counts = dict.fromkeys((episode.episode_id for episode in episodes), 0)

        async def step(episode: AsyncEpisode) -> None:
            await episode.step(EDITOR)
            while not done.is_set():
                await episode.step(TypeText("a"))
                counts[episode.episode_id] += 1
                if min(counts.values()) >= 2 or max(counts.values()) >= 25:
                    done.set()

        await asyncio.gather(*(step(episode) for episode in episodes))
        assert min(counts.values()) >= 1
        for episode in episodes:
            await episode.step(SAVE)
            note = await episode.read_file("/home/user/note.txt")
            assert note.decode().strip() == "a" * counts[episode.episode_id]


async def test_machines_that_are_kept_for_a_queued_group_are_taken_and_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of parked episodes that no longer yield to a group take what is ready: `resident` is never exceeded."""
    monkeypatch.setattr(parking, "_MAX_YIELD_S", 0.1)
    async with served(tmp_path, size=2, resident=3) as (server, client):
        used_counts: list[int] = []
        server.pool.changes.listen(lambda: used_counts.append(server.pool._used_count))
        episodes = await opened(client, 5)
        grouping = asyncio.ensure_future(client.reset_group(TASK, size=3, timeout=timedelta(minutes=10)))

        async def step(episode: AsyncEpisode) -> None:
            for _ in range(4):
                await episode.step(EDITOR)

        await asyncio.gather(*map(step, episodes))
        # No more calls pass it.
        assert len(await grouping) == 3
    assert max(used_counts) == 3


async def test_a_turn_that_comes_while_the_pool_is_asked_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the pool looked at the clock too, the call could wait for the end of its patience instead."""
    clock, waits_s = OffsetClock(), list[float]()

    def is_queued_before(time_s: float) -> bool:
        # Asked about other times too, to park the idle ones.
        is_of_call = any(abs(time_s - since_s) < 1e-3 for since_s in line.waiting_since_s)
        clock.offset_s += 11 if is_of_call else 0
        return is_of_call

    async def recorded(clock: Clock, at_s: float, *, or_event: asyncio.Event) -> None:
        waits_s.append(at_s - clock.monotonic())
        await wait_until(clock, at_s, or_event=or_event)

    async with served(tmp_path, clock=clock) as (server, client):
        episode = await parked(server, client)
        [line] = server.service._parking._lines.values()
        monkeypatch.setattr(parking, "wait_until", recorded)
        monkeypatch.setattr(server.pool, "is_queued_before", is_queued_before)
        await episode.step(EDITOR)
    assert waits_s[0] < 0


async def test_an_attempt_that_a_call_ends_before_it_starts_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, the call of an episode comes in the same turn of the loop in which its machine is to be given up."""
    async with served(tmp_path) as (server, client):
        opened_one = await client.open(TASK)
        service_parking = server.service._parking
        episode = service_parking._registry.find(opened_one.episode_id)
        [line] = service_parking._lines.values()
        assert episode is not None
        with monkeypatch.context() as patch:
            patch.setattr(server.pool, "missing_for", lambda _: 1)
            service_parking._park_idle(line)
        [attempt] = line.parking.values()
        await service_parking._end_parking(line, episode, attempt)
        assert attempt.cancelled()
        await until(lambda: not line.parking)
        await park(server, client, opened_one)


async def test_a_closed_episode_leaves_the_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call would else keep its place, and all behind it, until its caller has been gone for 10 s."""
    async with served(tmp_path) as (server, client):
        episode = await parked(server, client)
        [line] = server.service._parking._lines.values()
        with monkeypatch.context() as patch:
            patch.setattr(server.pool, "reserve_for_parked", lambda **_: None)
            patch.setattr(parking, "GRACE_S", 1000.0)
            call = asyncio.ensure_future(episode.step(EDITOR))
            await until(lambda: line.waiting_count == 1)
            await server.service.close(episode.episode_id)
            await until(lambda: line.waiting_count == 0)
        with pytest.raises(EpisodeNotFound):
            await call


async def test_a_fork_that_can_never_have_its_machines_is_refused_at_once(tmp_path: Path) -> None:
    """The parent keeps its machine meanwhile, so all others would wait for it too."""
    async with served(tmp_path, resident=1) as (_, client):
        episode = await client.open(TASK)
        with pytest.raises(GroupTooLarge, match="at most 1 machines, so never a group of 1 in addition to the 1"):
            await client.fork(episode, count=1)
