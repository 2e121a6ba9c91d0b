"""Checkpoints through the service: episodes that begin in a stored state, and what is refused."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    BadRequest,
    Checkpoint,
    CheckpointNotFound,
    CheckpointStoreFull,
    CheckpointUnusable,
    Click,
    Conflict,
    Done,
    EpisodeEnded,
    EpisodeNotFound,
    GroupTooLarge,
    KeyDown,
    KeyUp,
    NotForkable,
    NotSupported,
    Perturb,
    State,
    TypeText,
)
from envd.base.config import CheckpointsConfig
from envd.base.errors import RequestIdReused, StoreError
from envd.cli.checkpoints import table
from envd.episodes import automatic, checkpointing
from envd.episodes.checkpoints import states
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.types import CheckpointCommand
from envd.tasks import perturbations
from tests.support.callers import Tokens
from tests.support.clock import until
from tests.support.command import run_envd
from tests.support.server import FakeServer, served_client

TASK = "fake/save-note"
EDITOR, SAVE = Click(379, 311), Click(82, 86)
LINE = TypeText("Hello, fake desktop!")


def store_in(directory: Path, **settings: float) -> CheckpointStore:
    return CheckpointStore(directory / "checkpoints", settings=CheckpointsConfig(**settings), reserve_bytes=0)


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncEnvClient]]:
    """Serve with checkpoints in a directory; afterwards nothing unfinished is there."""
    store = options.pop("store", store_in(directory))
    async with served_client(**{"checkpoints": store, "size": 2, "capacity": 6, **options}) as (server, client):
        yield server, client
        assert server.hypervisor.host.captures == {}
    assert not list(directory.glob("checkpoints/part-*"))


async def typed(episode: AsyncEpisode, *texts: str) -> list[str]:
    """Type texts, each in a step; return the frames."""
    return [(await episode.step(TypeText(text))).observation.frame_id for text in texts]


def at(checkpoint: Checkpoint, server: FakeServer) -> Checkpoint:
    """Return the checkpoint as another server of the host has it."""
    return replace(checkpoint, host=server.address)


async def test_a_state_outlives_its_episode_and_its_daemon(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK, max_steps=9) as episode:
        await episode.step(EDITOR, TypeText("Room"), KeyDown("shift"))
        checkpoint = await episode.checkpoint("before the number")
        frames = await typed(episode, "a1", "b2")
        await episode.step(KeyUp("shift"))
    assert (checkpoint.step_count, checkpoint.max_steps, checkpoint.label) == (1, 9, "before the number")
    assert (checkpoint.episode_id, checkpoint.task_id, checkpoint.run) == (episode.episode_id, TASK, "")
    assert len(set(frames)) == 2
    async with served(tmp_path) as (server, client):
        kept = at(checkpoint, server)
        assert await client.list_checkpoints() == [kept]
        async with client.reset_group(kept, size=2) as episodes:
            for copy in episodes:
                assert copy.observation.frame_id == checkpoint.frame_id
                assert (copy.step_count, copy.max_steps, copy.task_id) == (1, 9, TASK)
                assert (copy.parent_episode_id, copy.checkpoint_id) == ("", checkpoint.checkpoint_id)
                assert await typed(copy, "a1", "b2") == frames
            assert episodes[0].instruction == episode.instruction
            assert episodes[0].origin == episodes[1].origin
            assert len({episode.episode_id, *(copy.episode_id for copy in episodes)}) == 3


async def test_a_copy_names_the_perturbations_of_its_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawn desktops have no programs for the true ones.
    verbs = [{"kind": "make_directory", "path": "/home/user/perturbed"}]
    monkeypatch.setitem(perturbations._KINDS, "theme", (lambda _: verbs, True))
    async with (
        served(tmp_path) as (_, client),
        client.reset(TASK, perturb=Perturb(seed=1, kinds=("theme",))) as episode,
    ):
        checkpoint = await episode.checkpoint()
        async with client.reset(checkpoint) as copy:
            assert copy.perturbations == episode.perturbations == ("theme",)
            again = await copy.checkpoint()
            async with client.reset(again) as last:
                assert last.perturbations == ("theme",)


async def test_held_keys_are_held_in_a_copy(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        await episode.step(EDITOR, KeyDown("shift"))
        checkpoint = await episode.checkpoint()
        async with client.reset(checkpoint) as copy:
            (found,) = [each for each in server.service.episodes if each.episode_id == copy.episode_id]
            assert (await found.machine.desktop.view()).inputs.keys != ()
            # Without the shift key that is held, the file would have small letters.
            await copy.step(TypeText("a"), KeyUp("shift"), SAVE)
            held = await copy.read_file("/home/user/note.txt")
        await episode.step(TypeText("a"), KeyUp("shift"), SAVE)
        assert held == await episode.read_file("/home/user/note.txt")


async def test_a_copy_is_scored_by_what_it_did(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        await episode.step(EDITOR, LINE)
        checkpoint = await episode.checkpoint()
        async with client.reset_group(checkpoint, size=2) as (saves, forgets):
            await saves.step(SAVE, Done())
            await forgets.step(Done())
            assert ((await saves.evaluate()).score, (await forgets.evaluate()).score) == (1, 0)
        assert not (await episode.step(SAVE)).done


async def test_checkpoints_form_a_tree(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        first = await episode.checkpoint()
        await episode.step(EDITOR)
        second = await episode.checkpoint()
        async with client.reset(first) as copy:
            third = await copy.checkpoint()
            async with client.reset(third) as deeper:
                assert deeper.observation.frame_id == first.frame_id
        assert [each.parent_checkpoint_id for each in (first, second, third)] == [
            "",
            first.checkpoint_id,
            first.checkpoint_id,
        ]
        assert await client.list_checkpoints(episode_id=episode.episode_id) == [first, second]
        assert await client.list_checkpoints(task="fake/none") == []
        assert await client.get_checkpoint(second.checkpoint_id) == second
        assert len(await client.list_checkpoints()) == 3


async def test_a_deleted_or_expired_checkpoint_is_not_found_and_its_copies_continue(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        async with client.reset(checkpoint) as copy:
            await client.delete_checkpoint(checkpoint)
            await client.delete_checkpoint(checkpoint)
            assert not (await copy.step(EDITOR)).done
        with pytest.raises(CheckpointNotFound, match="deleted, expired, or never created"):
            await client.open(checkpoint)
        with pytest.raises(CheckpointNotFound, match="deleted, expired, or never created"):
            await client.get_checkpoint(checkpoint.checkpoint_id)
        assert await client.list_checkpoints() == []


@pytest.mark.parametrize("phase", ["verify", "read_view", "restore"])
async def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    store = store_in(tmp_path)
    async with served(tmp_path, store=store) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        reader = {"verify": store, "read_view": states, "restore": server.hypervisor}[phase]
        read = getattr(reader, phase)

        def delete_and_read(*given: Any, **named: Any) -> Any:
            store.delete(checkpoint.checkpoint_id)
            return read(*given, **named)

        monkeypatch.setattr(reader, phase, delete_and_read)
        with pytest.raises(CheckpointNotFound, match="deleted, expired, or never created"):
            await client.open(checkpoint)


async def test_a_repeated_request_returns_the_same_checkpoint(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        command = CheckpointCommand(
            request_id="r", episode_id=episode.episode_id, step_index=0, label="a", fingerprint=b"1"
        )
        create = server.service.checkpoints.create
        first, again = await asyncio.gather(create(command), create(command))
        assert first == again
        with pytest.raises(RequestIdReused):
            await create(replace(command, fingerprint=b"2"))
        # As after a restart, which loses the recorded response.
        (found,) = server.service.episodes
        found.requests._entries.clear()
        found.requests._done_s.clear()
        await episode.step(EDITOR)
        assert (await create(command))[0] == first[0]
        found.requests._entries.clear()
        found.requests._done_s.clear()
        with pytest.raises(RequestIdReused):
            await create(replace(command, fingerprint=b"2"))
        assert len(await client.list_checkpoints()) == 1


async def test_only_the_present_state_of_an_active_episode_is_stored(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        (found,) = server.service.episodes
        episode.step_count += 1
        with pytest.raises(Conflict):
            await episode.checkpoint()
        episode.step_count -= 1
        machine = found.machine.machine
        machine.faults = replace(machine.faults, unforkable="a USB drive")  # type: ignore[attr-defined]
        with pytest.raises(NotForkable, match="a USB drive"):
            await episode.checkpoint()
        await episode.step(Done())
        with pytest.raises(EpisodeEnded):
            await episode.checkpoint()
        assert await client.list_checkpoints() == []


async def test_a_full_store_harms_no_episode(tmp_path: Path) -> None:
    store = store_in(tmp_path, limit_gib=1e-6)
    async with served(tmp_path, store=store) as (_, client), client.reset(TASK) as episode:
        with pytest.raises(CheckpointStoreFull, match=r"checkpoints\.limit_gib"):
            await episode.checkpoint()
        assert not (await episode.step(EDITOR)).done
        assert await client.list_checkpoints() == []


async def test_a_request_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        await episode.step(EDITOR)
        checkpoint = await episode.checkpoint()
        for changed, options in (
            (replace(checkpoint, task_id="fake/count-to-five"), {}),
            (checkpoint, {"max_steps": 1}),
            (checkpoint, {"pool": "other"}),
        ):
            with pytest.raises(BadRequest, match=f"{checkpoint.checkpoint_id}|of the checkpoint"):
                await client.open(changed, **options)
        with pytest.raises(GroupTooLarge):
            await client.reset_group(checkpoint, size=64).__aenter__()
        with pytest.raises(BadRequest, match="ttl"):
            await episode.checkpoint(ttl=timedelta(seconds=1))
        with pytest.raises(BadRequest, match="label"):
            await episode.checkpoint("x" * 257)
        with pytest.raises(BadRequest, match="takes at most"):
            await episode.checkpoint("x" * (10 << 20))
        assert await client.list_checkpoints() == [checkpoint]


async def test_a_copy_may_have_another_step_limit(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK, max_steps=2) as episode:
        await episode.step(EDITOR)
        checkpoint = await episode.checkpoint()
        async with client.reset(checkpoint, max_steps=3) as copy:
            states = [(await copy.step(TypeText(text))).state for text in ("a", "b")]
        assert states == [State.ACTIVE, State.TRUNCATED]
        async with client.reset(checkpoint) as copy:
            assert (await copy.step(TypeText("a"))).state == State.TRUNCATED


async def test_another_template_or_task_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
    path = tmp_path / "checkpoints" / checkpoint.checkpoint_id / "checkpoint.json"
    description = json.loads(path.read_text())
    other = "0" * 32
    changed_task = {"spec": description["spec"] | {"task_digest": other}}
    for changes, text in (({"template_digest": other}, "another template"), (changed_task, "has changed")):
        path.write_text(json.dumps(description | changes))
        async with served(tmp_path) as (server, client):
            with pytest.raises(CheckpointUnusable, match=text):
                await client.open(at(checkpoint, server))


async def test_a_damaged_checkpoint_opens_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        directory = tmp_path / "checkpoints" / checkpoint.checkpoint_id
        names = sorted(path.name for path in directory.iterdir() if path.name != "checkpoint.json")
        assert len(names) >= 3
        for name in names:
            data = (directory / name).read_bytes()
            for damaged in (data[:-1], data + b"x", bytes([data[0] ^ 1]) + data[1:]):
                (directory / name).write_bytes(damaged)
                with pytest.raises(CheckpointUnusable, match=f"file {name} is damaged"):
                    await client.open(checkpoint)
            (directory / name).write_bytes(data)
        assert len(list(server.service.episodes)) == 1
        async with client.reset(checkpoint) as copy:
            assert copy.step_count == 0


async def test_a_checkpoint_of_another_token_does_not_exist(tmp_path: Path) -> None:
    tokens = Tokens.create(tmp_path / "tokens")
    async with served(tmp_path, security=tokens.security()) as (server, _):
        alice, bob, admin = (
            AsyncEnvClient(server.address, token=each.secret) for each in (tokens.alice, tokens.bob, tokens.admin)
        )
        async with alice, bob, admin, alice.reset(TASK) as episode:
            checkpoint = await episode.checkpoint()
            assert await bob.list_checkpoints() == []
            await bob.delete_checkpoint(checkpoint)
            with pytest.raises(CheckpointNotFound):
                await bob.open(checkpoint)
            assert await alice.list_checkpoints() == await admin.list_checkpoints() == [checkpoint]
            async with admin.reset(checkpoint) as copy:
                assert copy.observation.frame_id == checkpoint.frame_id


async def test_only_those_that_may_use_all_delete_a_damaged_checkpoint(tmp_path: Path) -> None:
    tokens = Tokens.create(tmp_path / "tokens")
    async with served(tmp_path, security=tokens.security()) as (server, _):
        alice, bob, admin = (
            AsyncEnvClient(server.address, token=each.secret) for each in (tokens.alice, tokens.bob, tokens.admin)
        )
        async with alice, bob, admin, alice.reset(TASK) as episode:
            checkpoint = await episode.checkpoint()
            directory = tmp_path / "checkpoints" / checkpoint.checkpoint_id
            (directory / "checkpoint.json").write_text("{")
            await bob.delete_checkpoint(checkpoint)
            assert directory.exists()
            await admin.delete_checkpoint(checkpoint)
            assert not directory.exists()


class Gate:
    """Holds the threads that complete checkpoints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        complete = CheckpointStore.complete

        def held(store: CheckpointStore, *arguments: Any) -> Any:
            self.entered.release()
            self.opened.wait()
            return complete(store, *arguments)

        monkeypatch.setattr(CheckpointStore, "complete", held)

    async def __aenter__(self) -> "Gate":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let a test that failed end."""
        self.opened.set()

    async def entering(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.to_thread(self.entered.acquire)


async def test_an_episode_that_is_closed_while_its_checkpoint_is_written_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    closed_twice: list[int] = []
    close = os.close

    def checked_close(descriptor: int) -> None:
        try:
            close(descriptor)
        except OSError:
            closed_twice.append(descriptor)
            raise

    monkeypatch.setattr(os, "close", checked_close)
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode, gate:
        creating = asyncio.create_task(episode.checkpoint())
        await gate.entering()
        closing = asyncio.create_task(server.service.close(episode.episode_id))
        await asyncio.sleep(0)
        gate.opened.set()
        await closing
        with pytest.raises(EpisodeNotFound):
            await creating
        assert not list(tmp_path.glob("checkpoints/part-*"))
        (checkpoint,) = await client.list_checkpoints()
        async with client.reset(checkpoint):
            pass
    assert closed_twice == []


async def test_a_cancelled_beginning_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, opened = threading.Event(), threading.Event()
    begin = CheckpointStore.begin

    def held(store: CheckpointStore, *arguments: Any) -> Any:
        draft = begin(store, *arguments)
        entered.set()
        opened.wait()
        return draft

    monkeypatch.setattr(CheckpointStore, "begin", held)
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        creating = asyncio.create_task(episode.checkpoint())
        await asyncio.to_thread(entered.wait)
        closing = asyncio.create_task(server.service.close(episode.episode_id))
        await asyncio.sleep(0)
        opened.set()
        await closing
        with pytest.raises(EpisodeNotFound):
            await creating
        assert not list(tmp_path.glob("checkpoints/*"))
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not [link for link in links if str(tmp_path / "checkpoints") in os.readlink(link)]


async def test_checkpoints_of_one_token_that_wait_for_the_disk_delay_no_step_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tokens = Tokens.create(tmp_path / "tokens")
    async with served(tmp_path, security=tokens.security(), capacity=4) as (server, _), gate:
        alice, bob = (AsyncEnvClient(server.address, token=each.secret) for each in (tokens.alice, tokens.bob))
        async with alice, bob, alice.reset(TASK) as hers, bob.reset(TASK) as his:
            creating = [asyncio.create_task(hers.checkpoint(f"{number}")) for number in range(40)]
            await gate.entering(2)
            # No more of hers are written, and their copies are not made yet; his are.
            assert not gate.entered.acquire(blocking=False)
            assert len(server.hypervisor.host.captures) <= 2
            await typed(his, "a", "b")
            assert len(await bob.list_checkpoints()) == 0
            own = asyncio.create_task(his.checkpoint())
            await gate.entering()
            await typed(his, "c")
            gate.opened.set()
            assert (await own).step_count == 2
            await asyncio.gather(*creating)
            assert len(await alice.list_checkpoints()) == 40


async def test_automatic_checkpoints_of_one_owner_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(automatic, "MAX_COPIES", 3)
    monkeypatch.setattr(automatic, "_WAIT_S", 0.0)
    async with served(tmp_path) as (server, client), client.reset(TASK, checkpoint_every=1) as episode, gate:
        await typed(episode, *"abcdefgh")
        assert len(server.hypervisor.host.captures) == 3
        failures = server.metrics.registry.get_sample_value(
            "envd_episode_failures_total", {"pool": "fake", "operation": "checkpoint", "reason": "RATE_LIMITED"}
        )
        assert failures == 5
        assert caplog.text.count("no automatic checkpoint: the daemon: 3 of them are being written") == 1
        gate.opened.set()
        await until(lambda: not server.hypervisor.host.captures)
        assert len(await client.list_checkpoints()) == 3
        await typed(episode, "i")
        await until(lambda: not server.hypervisor.host.captures)
        assert len(await client.list_checkpoints()) == 4


async def test_a_daemon_that_stops_does_not_wait_for_all_automatic_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(automatic, "_DRAIN_S", 0.0)
    async with served(tmp_path) as (server, client), gate:
        async with client.reset(TASK, checkpoint_every=1) as episode:
            await typed(episode, *"abcdefgh")
        await gate.entering(2)
        stopping = asyncio.create_task(server.service.aclose())
        await until(lambda: "automatic checkpoints are not stored: the daemon stops" in caplog.text)
        gate.opened.set()
        await stopping
    assert len(store_in(tmp_path).list()) == 2


async def test_exports_of_one_caller_are_bounded_and_end_when_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint_id = (await episode.checkpoint()).checkpoint_id
        checkpoints = server.service.checkpoints

        def export(caller: str) -> AsyncGenerator[bytes, None]:
            return checkpoints.exported(checkpoint_id, lambda _: True, caller=caller)

        running = [export("alice") for _ in range(4)]
        for each in running:
            assert await anext(each)
        waiting, other = export("alice"), export("bob")
        first = asyncio.ensure_future(anext(waiting))
        assert await anext(other)
        assert not first.done()
        await running[0].aclose()
        assert await first
        for each in (*running, waiting, other):
            await each.aclose()
        monkeypatch.setattr(checkpointing, "_UNREAD_S", 0.0)
        unread = export("alice")
        assert await anext(unread)
        with pytest.raises(StoreError, match=f"{checkpoint_id}: nothing was read for 0 s; export it again"):
            await anext(unread)


async def test_without_a_directory_checkpoints_are_not_supported(tmp_path: Path) -> None:
    async with served_client() as (_, client), client.reset(TASK) as episode:
        with pytest.raises(NotSupported):
            await episode.checkpoint()


async def test_the_command_lists_and_deletes(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint("with [brackets]", pinned=True)
        other = await episode.checkpoint()

        async def envd(*words: str) -> tuple[int, str, str]:
            done = await asyncio.to_thread(run_envd, *words, ENVD_TARGET=server.address, COLUMNS="200")
            return done.status, done.out, done.err

        _, listed, _ = await envd("checkpoints", "list")
        assert checkpoint.checkpoint_id in listed
        console = Console(file=io.StringIO(), width=200)
        console.print(table([checkpoint], now=checkpoint.create_time))
        (_, row) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert "with [brackets]" in row
        assert row.split()[-3:] == ["0s", "1d00h", "pinned"]
        status, out, _ = await envd("checkpoints", "list", "--json", "--episode", episode.episode_id)
        found = json.loads(out)["checkpoints"]
        assert [each["checkpoint_id"] for each in found] == [checkpoint.checkpoint_id, other.checkpoint_id]
        _, shown, _ = await envd("checkpoints", "show", other.checkpoint_id)
        assert f"ancestors             {checkpoint.checkpoint_id}\n" in shown
        _, shown, _ = await envd("checkpoints", "show", other.checkpoint_id, "--json")
        assert json.loads(shown)["ancestors"] == [checkpoint.checkpoint_id]
        assert (await envd("checkpoints", "show", "ckpt-0"))[0] == 1
        status, _, err = await envd("checkpoints", "delete", other.checkpoint_id, "ckpt-0")
        assert (status, "checkpoint ckpt-0: not found" in err) == (1, True)
        status, out, _ = await envd("checkpoints", "delete", checkpoint.checkpoint_id, other.checkpoint_id)
        assert (status, out) == (0, f"deleted {checkpoint.checkpoint_id}, {other.checkpoint_id}\n")
        assert (await envd("checkpoints", "list"))[2] == "no checkpoints\n"


async def test_the_command_opens_a_checkpoint_until_it_is_interrupted(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, client), client.reset(TASK) as episode:
        await episode.step(EDITOR)
        checkpoint = await episode.checkpoint()
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "envd", "checkpoints", "open", checkpoint.checkpoint_id),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "ENVD_TARGET": server.address},
        )
        assert command.stdout is not None
        assert command.stderr is not None
        opened = (await command.stdout.readline()).decode().strip()
        assert "at step 1" in (await command.stderr.readline()).decode()
        assert {each.episode_id for each in await client.list_episodes()} == {episode.episode_id, opened}
        command.send_signal(signal.SIGINT)
        _, err = await command.communicate()
        assert err.decode().endswith("closed\n")
        assert [each.episode_id for each in await client.list_episodes()] == [episode.episode_id]
