"""Checkpoints that travel between hosts as files: equal states there, and no damaged or foreign file is stored."""

import asyncio
import functools
import itertools
import json
import operator
import pickle
import shutil
import stat
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

from cuaenv.client import (
    AsyncEnvClient,
    BadRequest,
    Checkpoint,
    CheckpointNotFound,
    CheckpointStoreFull,
    CheckpointUnusable,
    Click,
    EnvError,
    TypeText,
)
from envd.base.config import CheckpointsConfig
from envd.base.errors import InvalidRequest
from envd.episodes import checkpointing
from envd.episodes.checkpoints import archive as module
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.progress import EpisodeSpec, Progress
from envd.tasks.basis import task_digest
from envd.tasks.user import Exchange
from tests.support.callers import Tokens
from tests.support.command import run_envd
from tests.support.server import FakeServer, served_client, with_user

TASK = "fake/save-note"
EDITOR = Click(379, 311)


@asynccontextmanager
async def served(directory: Path, *, limit_gib: float = 1, **options: Any) -> AsyncIterator[tuple[FakeServer, Any]]:
    """Serve as a host of its own; afterwards its directory has nothing unfinished."""
    store = CheckpointStore(directory / "checkpoints", settings=CheckpointsConfig(limit_gib=limit_gib), reserve_bytes=0)
    async with served_client(checkpoints=store, size=2, capacity=4, **options) as (server, client):
        yield server, client
    assert not list(directory.glob("checkpoints/part-*"))


@asynccontextmanager
async def exported(directory: Path) -> AsyncIterator[tuple[Checkpoint, Path, list[str]]]:
    """Yield a checkpoint, its file, and the frames of the steps after it."""
    file = directory / "state.ckpt"
    async with served(directory / "first") as (_, client), client.reset(TASK) as episode:
        await episode.step(EDITOR)
        checkpoint = await episode.checkpoint("to go", pinned=True)
        assert await client.export_checkpoint(checkpoint, file) == file.stat().st_size
        frames = [(await episode.step(TypeText(text))).observation.frame_id for text in ("a", "b")]
    yield checkpoint, file, frames


async def test_an_imported_state_continues_like_the_original(tmp_path: Path) -> None:
    async with exported(tmp_path) as (checkpoint, file, frames), served(tmp_path / "second") as (server, client):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [path.name for path in tmp_path.glob("*.part")] == []
        there = await client.import_checkpoint(file)
        assert await client.list_checkpoints() == [there]
        assert there.host == server.address
        for name in ("checkpoint_id", "label", "episode_id", "task_id", "run", "step_count", "max_steps", "frame_id"):
            assert getattr(there, name) == getattr(checkpoint, name)
        assert (there.pinned, there.size_bytes) == (True, checkpoint.size_bytes)
        assert there.expire_time > checkpoint.expire_time
        async with client.reset_group(there, size=2) as copies:
            for copy in copies:
                assert copy.observation.frame_id == checkpoint.frame_id
                assert [(await copy.step(TypeText(t))).observation.frame_id for t in ("a", "b")] == frames
        assert await client.import_checkpoint(file) == there
        again = tmp_path / "again.ckpt"
        await client.export_checkpoint(there, again)
        await client.delete_checkpoint(there)
        assert (await client.import_checkpoint(again)).checkpoint_id == there.checkpoint_id


async def test_a_damaged_archive_is_refused_and_stores_nothing(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (_, client):
        data = file.read_bytes()
        places = [0, 17, 25, *range(40, len(data), len(data) // 20), len(data) - 1]
        flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
        cut = [data[:length] for length in (0, 5, 19, 100, len(data) // 2, len(data) - 1)]
        damaged = [*flipped, *cut, data + b"x", data * 2, data[::-1]]
        assert len(damaged) >= 30
        for content in damaged:
            file.write_bytes(content)
            with pytest.raises((CheckpointUnusable, BadRequest), match=r"archive|checkpoint"):
                await client.import_checkpoint(file)
        assert await client.list_checkpoints() == []
        file.write_bytes(data)
        assert await client.import_checkpoint(file)


async def test_a_path_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
            with pytest.raises(error):
                await client.import_checkpoint(path)


async def test_a_checkpoint_that_is_deleted_before_its_files_are_open_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()

        def delete_and_archive(found: Manifest, directory: Path) -> Generator[bytes, None, None]:
            shutil.rmtree(directory)
            return module.archived(found, directory)

        monkeypatch.setattr(checkpointing, "archived", delete_and_archive)
        with pytest.raises(CheckpointNotFound):
            await client.export_checkpoint(checkpoint, tmp_path / "state.ckpt")


async def test_a_refusal_during_the_transfer_keeps_its_reason(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (_, client):
        data = file.read_bytes()
        file.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:] + bytes(8 << 20))
        for _ in range(60):  # grpc loses the status of 3 %
            with pytest.raises(CheckpointUnusable, match="its manifest is damaged"):
                await client.import_checkpoint(file)


def manifest_in(data: bytes) -> bytes:
    start = len(module._MAGIC) + 4
    return data[start : start + int.from_bytes(data[start - 4 : start], "little")]


def resealed(data: bytes, **changes: object) -> bytes:
    """Return an archive with other values in its manifest, by path, and a digest that fits."""
    original = manifest_in(data)
    manifest = json.loads(original)
    for name, value in changes.items():
        *parents, last = name.split(".")
        functools.reduce(operator.getitem, parents, manifest)[last] = value
    text = json.dumps(manifest).encode()
    head = module._MAGIC + len(text).to_bytes(4, "little") + text + xxhash.xxh3_128(text).digest()
    return head + data[len(module._MAGIC) + 4 + len(original) + 16 :]


#: Values in a manifest, by path, with the refusal and its text.
REFUSED: tuple[tuple[dict[str, object], type[EnvError], str], ...] = (
    ({"template_digest": "0" * 32}, CheckpointUnusable, "another template"),
    ({"spec.task_digest": "0" * 32}, CheckpointUnusable, "has changed"),
    ({"spec.task_id": "fake/none"}, CheckpointUnusable, "is not served"),
    ({"spec.pool": "other"}, CheckpointUnusable, "no pool 'other'"),
    ({"format": 3}, BadRequest, r"this version of envd does not read \(manifest: format 3 is of a newer envd"),
    ({"spec.later": ""}, BadRequest, "this version of envd does not read"),
    ({"progress.later": ""}, BadRequest, "this version of envd does not read"),
    ({"checkpoint_id": "../../etc"}, BadRequest, "no checkpoint has"),
    ({"checkpoint_id": "ckpt-../x"}, BadRequest, "no checkpoint has"),
    ({"files": {"../memory": {"size_bytes": 1, "digest": ""}}}, BadRequest, "no checkpoint has"),
    ({"files": {"checkpoint.json": {"size_bytes": 1, "digest": ""}}}, BadRequest, "no checkpoint has"),
    ({"files": {"memory": {"size_bytes": -1, "digest": ""}}}, BadRequest, "must be at least 0"),
    ({"files": {"memory": {"size_bytes": 1 << 50, "digest": ""}}}, CheckpointStoreFull, "limit_gib"),
    ({"create_time": "2026-01-01T00:00:00"}, BadRequest, "create_time"),
    ({"expire_time": "9999-12-31T23:59:59+00:00"}, BadRequest, "expire_time"),
    ({"expire_time": "2026-01-01T00:00:00Z"}, BadRequest, "lifetime"),
    ({"progress.step_count": 1 << 40}, BadRequest, "step_count: must be at most"),
    ({"label": "x" * 257}, BadRequest, "label"),
    ({"spec.run": "\ud800"}, BadRequest, "does not read"),
)


async def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (_, client):
        async with client.reset(TASK):  # so that the pool has its template
            pass
        original = file.read_bytes()
        for changes, error, text in REFUSED:
            file.write_bytes(resealed(original, **changes))
            with pytest.raises(error, match=text):
                await client.import_checkpoint(file)
            assert await client.list_checkpoints() == [], changes


#: None of these is the value of any field, or it harms nothing.
WRONG: tuple[Any, ...] = (None, -1, 1 << 31, 10**400, 1.5, "x" * 300, "2026-01-01T00:00:00", [], [["a", "b"]] * 200, {})


STORED = Path(__file__).parents[1] / "support" / "stored"


@pytest.mark.parametrize("release", ["0.2.0", "0.3.0"])
async def test_archives_and_checkpoints_of_earlier_releases_are_read(tmp_path: Path, release: str) -> None:
    async with served(tmp_path, extra_tasks=[with_user()]) as (server, client):
        async with client.reset("fake/with-user"):
            template = server.pool.template
        assert template is not None
        file = tmp_path / "state.ckpt"
        # Other versions of the drawn desktop and of its suite have other digests.
        task = "spec.task_digest" if release == "0.3.0" else "task_digest"
        digests = {"template_digest": template.snapshot.template_digest, task: task_digest(with_user())}
        file.write_bytes(resealed((STORED / release / "state.ckpt").read_bytes(), **digests))
        there = await client.import_checkpoint(file)
        assert (there.label, there.task_id, there.run, there.pool) == ("to keep", "fake/with-user", "run-1", "fake")
        assert (there.step_count, there.max_steps, there.epoch, there.pinned) == (1, 9, 1, True)
        if release == "0.2.0":  # which stored drawn desktops in a format that is not read
            with pytest.raises(CheckpointUnusable):
                await client.open(there)
        else:
            async with client.reset(there) as episode:
                assert (episode.step_count, episode.perturbations) == (1, ("theme",))
                assert server.service._registry.get(episode.episode_id).progress.asked == (
                    Exchange("Which room?", "The room."),
                )
        # As a daemon of that release stored it.
        path = tmp_path / "checkpoints" / there.checkpoint_id / "checkpoint.json"
        path.write_bytes(manifest_in(file.read_bytes()))
    async with served(tmp_path) as (_, client):
        (found,) = await client.list_checkpoints()
        assert (found.checkpoint_id, found.step_count, found.frame_id) == (
            there.checkpoint_id,
            there.step_count,
            there.frame_id,
        )


#: Every value of a manifest.
PATHS = [
    *Manifest.model_fields,
    *(f"spec.{each.name}" for each in fields(EpisodeSpec)),
    *(f"progress.{each.name}" for each in fields(Progress)),
]


async def test_no_value_in_an_archive_breaks_a_later_call(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (_, client):
        original = file.read_bytes()
        stored_count = 0
        bugs = []
        for name, value in itertools.product(PATHS, WRONG):
            file.write_bytes(resealed(original, **{name: value}))
            try:
                there = await client.import_checkpoint(file)
                stored_count += 1
                async with client.reset(there) as episode:
                    assert await client.list_episodes()
                    await episode.step(TypeText("x"))
            except EnvError as error:
                bugs += [(name, value, error)] if error.reason == "BUG" else []
            for each in await client.list_checkpoints():
                await client.delete_checkpoint(each)
        assert stored_count
        assert bugs == []
        # Deeper than any parser follows.
        depth = b"[" * 300_000 + b"]" * 300_000
        file.write_bytes(module._MAGIC + len(depth).to_bytes(4, "little") + depth + xxhash.xxh3_128(depth).digest())
        with pytest.raises(BadRequest, match="does not read"):
            await client.import_checkpoint(file)


async def test_a_stored_description_that_cannot_be_read_is_not_listed_and_can_be_deleted(tmp_path: Path) -> None:
    async with exported(tmp_path) as (checkpoint, _, _):
        async with served(tmp_path / "first") as (_, client):
            assert len(await client.list_checkpoints()) == 1
        description = tmp_path / "first" / "checkpoints" / checkpoint.checkpoint_id / "checkpoint.json"
        text = json.loads(description.read_text())
        description.write_text(json.dumps(text | {"create_time": "2026-01-01T00:00:00"}))
        async with served(tmp_path / "first") as (server, client):
            assert await client.list_checkpoints() == []
            await client.delete_checkpoint(replace(checkpoint, host=server.address))
        assert not description.exists()


def with_files(data: bytes, directory: Path, **contents: bytes) -> bytes:
    """Return an archive with other contents of files; `_` in a name is a dot."""
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "checkpoint.json"}
    files |= {name.replace("_", "."): content for name, content in contents.items()}
    listed = {
        name: {"size_bytes": len(content), "digest": xxhash.xxh3_128_hexdigest(content)}
        for name, content in files.items()
    }
    start = len(module._MAGIC) + 4
    length = int.from_bytes(data[start - 4 : start], "little")
    return resealed(data[: start + length + 16], files=listed) + b"".join(files.values())


async def test_a_view_that_no_display_shows_is_refused(tmp_path: Path) -> None:
    async with exported(tmp_path) as (checkpoint, file, _), served(tmp_path / "second") as (_, client):
        original, directory = file.read_bytes(), tmp_path / "first" / "checkpoints" / checkpoint.checkpoint_id
        view = json.loads((directory / "view.json").read_text())
        cursor = {"hot_x_px": 0, "hot_y_px": 0, "shape": [512, 512, 4]}
        views: tuple[Any, ...] = (
            {"width_px": 32767, "height_px": 32767},
            {"width_px": 8192, "height_px": 8192},
            {"width_px": 0},
            {"capture_time": "2026-01-01T00:00:00"},
            {"capture_time": 10**400},
            {"cursor": cursor | {"shape": [1 << 14, 1 << 14, 4]}},
            {"cursor": cursor | {"shape": [1, 1, 1]}},
            {"cursor": cursor | {"hot_x_px": -1}},
            {"cursor": cursor},
            {"inputs": view["inputs"] | {"pointer": {"x_px": -1, "y_px": 0}}},
            {"inputs": view["inputs"] | {"buttons": 256}},
            {"inputs": view["inputs"] | {"keys": [{"scancode": 1 << 40, "keysym": 0}]}},
            {"home": "x" * (1 << 17)},
        )
        refused = [{"view_json": json.dumps(view | changes).encode()} for changes in views]
        refused += [
            {"view_json": b"[" * 100_000},
            {"screen_zst": zstandard.compress(bytes(256 << 20))},
            {"screen_zst": zstandard.compress(bytes(16))},
            {"screen_zst": b"x"},
        ]
        for contents in refused:
            file.write_bytes(with_files(original, directory, **contents))
            with pytest.raises(CheckpointUnusable, match="its screen cannot be read"):
                await client.import_checkpoint(file)
            assert await client.list_checkpoints() == []
        # The screen of the same size, once as it was.
        file.write_bytes(with_files(original, directory))
        assert await client.import_checkpoint(file)


async def test_an_archive_lives_for_a_year_at_most(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (_, client):
        file.write_bytes(resealed(file.read_bytes(), expire_time="8999-01-01T00:00:00+14:00"))
        there = await client.import_checkpoint(file)
        assert there.expire_time < datetime.now(UTC) + timedelta(days=366)


async def test_an_archive_that_differs_from_the_checkpoint_here_is_refused(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "first") as (_, client):
        (known,) = await client.list_checkpoints()
        file.write_bytes(resealed(file.read_bytes(), files={"memory": {"size_bytes": 0, "digest": ""}}))
        with pytest.raises(CheckpointUnusable, match="has another one with this id"):
            await client.import_checkpoint(file)
        assert await client.list_checkpoints() == [known]


async def test_without_tokens_an_imported_checkpoint_has_no_owner(tmp_path: Path) -> None:
    async with exported(tmp_path) as (checkpoint, file, _):
        file.write_bytes(resealed(file.read_bytes(), **{"spec.owner": "alice"}))
        await asyncio.to_thread(shutil.copytree, tmp_path / "first", tmp_path / "second", dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "second" / "checkpoints")
        async with served(tmp_path / "second") as (_, client):
            found = await client.import_checkpoint(file)
            assert found.checkpoint_id == checkpoint.checkpoint_id
            assert [each.checkpoint_id for each in await client.list_checkpoints()] == [checkpoint.checkpoint_id]


async def test_a_full_store_stores_no_archive(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second", limit_gib=1e-6) as (_, client):
        with pytest.raises(CheckpointStoreFull, match=r"checkpoints\.limit_gib"):
            await client.import_checkpoint(file)
        assert await client.list_checkpoints() == []


async def test_a_silent_sender_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.05)

    async def pieces() -> AsyncIterator[bytes]:
        yield module._MAGIC
        await asyncio.Event().wait()

    async with served(tmp_path) as (server, _):
        with pytest.raises(InvalidRequest, match="nothing was sent"):
            await server.service.checkpoints.import_archive(pieces())


async def test_an_import_whose_client_is_gone_leaves_nothing(tmp_path: Path) -> None:
    half_sent = asyncio.Event()

    async def pieces(data: bytes) -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        half_sent.set()
        await asyncio.Event().wait()

    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (server, client):
        importing = asyncio.create_task(server.service.checkpoints.import_archive(pieces(file.read_bytes())))
        await half_sent.wait()
        assert len(list(tmp_path.glob("second/checkpoints/part-*"))) == 1
        importing.cancel()
        await asyncio.wait({importing})
        assert importing.cancelled()
        assert list(tmp_path.glob("second/checkpoints/*")) == []
        assert await client.import_checkpoint(file)


async def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        stored = tmp_path / "checkpoints" / checkpoint.checkpoint_id / "guest"
        stored.write_bytes(stored.read_bytes()[:-1])
        target = tmp_path / "state.ckpt"
        target.write_bytes(b"earlier")
        with pytest.raises(CheckpointUnusable, match="file guest is damaged"):
            await client.export_checkpoint(checkpoint, target)
        assert target.read_bytes() == b"earlier"
        assert not list(tmp_path.glob("*.part"))


async def test_only_administrators_import_and_only_owners_export(tmp_path: Path) -> None:
    tokens = Tokens.create(tmp_path / "tokens")
    file = tmp_path / "state.ckpt"
    async with served(tmp_path, security=tokens.security()) as (server, _):
        alice, bob, admin = (
            AsyncEnvClient(server.address, token=each.secret) for each in (tokens.alice, tokens.bob, tokens.admin)
        )
        async with alice, bob, admin, alice.reset(TASK) as episode:
            checkpoint = await episode.checkpoint()
            with pytest.raises(CheckpointNotFound, match="deleted, expired, or never created"):
                await bob.export_checkpoint(checkpoint, file)
            await alice.export_checkpoint(checkpoint, file)
            await alice.delete_checkpoint(checkpoint)
            with pytest.raises(EnvError, match="ImportCheckpoint needs admin"):
                await alice.import_checkpoint(file)
            await admin.import_checkpoint(file)
            assert len(await alice.list_checkpoints()) == 1
            assert await bob.list_checkpoints() == []


async def test_a_guest_of_another_host_runs_no_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    guest = zstandard.compress(pickle.dumps(Attack()))
    async with exported(tmp_path) as (_, file, _), served(tmp_path / "second") as (_, client):
        there = await client.import_checkpoint(file)
        path = tmp_path / "second" / "checkpoints" / there.checkpoint_id
        (path / "guest").write_bytes(guest)
        manifest = json.loads((path / "checkpoint.json").read_text())
        manifest["files"]["guest"] = {"size_bytes": len(guest), "digest": xxhash.xxh3_128_hexdigest(guest)}
        (path / "checkpoint.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointUnusable, match="in a form that is no longer read"):
            await client.open(there)
        assert not (tmp_path / "ran").exists()


async def test_the_commands_export_and_import(tmp_path: Path) -> None:
    file = str(tmp_path / "state.ckpt")

    async def envd(host: str, *words: str) -> tuple[int, str, str]:
        done = await asyncio.to_thread(run_envd, "checkpoints", *words, ENVD_TARGET=host, COLUMNS="200")
        return done.status, done.out, done.err

    async with served(tmp_path / "first") as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        status, out, _ = await envd(server.address, "export", checkpoint.checkpoint_id, file)
        assert (status, out.startswith(f"wrote {file}, 0.")) == (0, True)
        status, _, err = await envd(server.address, "export", "ckpt-0", file)
        assert (status, "checkpoint ckpt-0: not found" in err) == (1, True)
    async with served(tmp_path / "second") as (server, client):
        status, out, _ = await envd(server.address, "import", file, "--json")
        assert (status, json.loads(out)["checkpoint_id"]) == (0, checkpoint.checkpoint_id)
        status, _, err = await envd(server.address, "import", str(tmp_path / "none"))
        assert (status, "none: cannot be read: No such file" in err) == (2, True)
