"""Checkpoints of real machines: a copy shows what the original showed, also under a later daemon and at any depth."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    BadRequest,
    Checkpoint,
    CheckpointUnusable,
    Click,
    Settle,
    TypeText,
    View,
)
from envd.base.config_sources import load
from envd.daemon.composition import open_daemon
from tests.support.leftovers import machine_leftovers

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

TASK = "desktop/type-greeting"
TEXTS = ("one ", "two")
#: A guest may draw in two parts if other work keeps the host's cores busy.
SLOW_SETTLE = Settle(quiet=timedelta(seconds=1), max=timedelta(seconds=20))


@asynccontextmanager
async def served(cache_dir: Path, template_dir: Path, state_dir: Path, store: Path) -> AsyncIterator[AsyncEnvClient]:
    """Run a daemon with checkpoints in `store`."""
    cache = store / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / "images").exists():
        (cache / "images").symlink_to(cache_dir / "images")
    config = load(
        flags={
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "state_dir": state_dir,
            "cache_dir": cache,
            "hypervisor.template_dir": template_dir,
            "pools": {"desktop": {"size": 1, "capacity": 4, "allow_guest_access": True}},
        }
    )
    async with open_daemon(config) as daemon, AsyncEnvClient(daemon.address, token="") as client:
        yield client
    assert machine_leftovers(state_dir) == []


async def typed(episode: AsyncEpisode) -> list[str]:
    return [(await episode.step(TypeText(text), settle=SLOW_SETTLE)).observation.frame_id for text in TEXTS]


async def test_a_state_continues_under_a_later_daemon(
    cache_dir: Path, template_dir: Path, vm_state_dir: Path, tmp_path: Path
) -> None:
    checkpoints: list[Checkpoint] = []
    async with (
        served(cache_dir, template_dir, vm_state_dir, tmp_path) as client,
        client.reset(TASK, timeout=timedelta(minutes=30)) as episode,
    ):
        await episode.step(Click(640, 400), TypeText("Zero "))
        note = "echo kept > /home/user/kept; sync"
        assert (await episode.run_command(["sh", "-c", note])).exit_code == 0
        checkpoints.append(await episode.checkpoint())
        frames = await typed(episode)
        # A checkpoint of a checkpoint has the pages and the disk of both.
        async with client.reset(checkpoints[0]) as copy:
            await copy.run_command(["sh", "-c", "echo more >> /home/user/kept; sync"])
            checkpoints.append(await copy.checkpoint())
        await episode.run_command(["sh", "-c", "rm /home/user/kept; sync"])
        assert (await episode.rollback(checkpoints[0])).frame_id == checkpoints[0].frame_id
        assert (episode.epoch, episode.step_count) == (2, 1)
        assert await typed(episode) == frames
        assert await episode.read_file("/home/user/kept") == b"kept\n"
    assert len(set(frames)) == len(TEXTS)
    async with served(cache_dir, template_dir, vm_state_dir, tmp_path) as client:
        kept = [replace(each, host=client.targets[0]) for each in checkpoints]
        assert await client.list_checkpoints() == kept
        for checkpoint, size, text in zip(kept, (2, 1), (b"kept\n", b"kept\nmore\n"), strict=True):
            async with client.reset_group(checkpoint, size=size, timeout=timedelta(minutes=30)) as copies:
                for copy in copies:
                    assert copy.observation.frame_id == checkpoint.frame_id
                    assert await typed(copy) == frames
                    assert await copy.read_file("/home/user/kept") == text
        directory = tmp_path / "cache" / "checkpoints" / kept[0].checkpoint_id
        for name in ("memory.zst", "devices.zst", "disk.qcow2.zst"):
            data = (directory / name).read_bytes()
            (directory / name).write_bytes(data[:-1])
            with pytest.raises(CheckpointUnusable, match=f"file {name} is damaged"):
                await client.open(kept[0], view=View(encoding="none"))
            (directory / name).write_bytes(data)


@pytest.mark.long
async def test_an_exported_state_continues_on_another_host(
    cache_dir: Path, template_dir: Path, vm_state_dir: Path, tmp_path: Path
) -> None:
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "state.ckpt"
    first.mkdir()
    second.mkdir()
    async with (
        served(cache_dir, template_dir, vm_state_dir, first) as client,
        client.reset(TASK, timeout=timedelta(minutes=30)) as episode,
    ):
        await episode.step(Click(640, 400), TypeText("Zero "))
        checkpoint = await episode.checkpoint()
        await client.export_checkpoint(checkpoint, file)
        frames = await typed(episode)
    data = file.read_bytes()
    async with served(cache_dir, template_dir, vm_state_dir, second) as client:
        for at in range(20, len(data), len(data) // 20):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises((CheckpointUnusable, BadRequest)):
                await client.import_checkpoint(file)
        assert await client.list_checkpoints() == []
        file.write_bytes(data)
        there = await client.import_checkpoint(file)
        async with client.reset_group(there, size=2, timeout=timedelta(minutes=30)) as copies:
            for copy in copies:
                assert copy.observation.frame_id == checkpoint.frame_id
                assert await typed(copy) == frames
