"""Machines that die while a group, a fork, a checkpoint or a rollback starts them from a frozen state."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint, Click, MachineLost, SetupFailed, View
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from envd.pool.leased import LeasedMachine
from envd.pool.pool import MachinePool
from tests.support.faulty import FaultyMachine
from tests.support.server import served_client

TASK = "fake/save-note"
#: An accessibility tree makes each guest run.
TREE = View(a11y_tree=True)


async def start(way: str, client: AsyncEnvClient, episode: AsyncEpisode, checkpoint: Checkpoint) -> None:
    """Start machines from a frozen state, in one of the four ways."""
    match way:
        case "group":
            async with client.reset_group("fake/append-line", size=2, view=TREE):
                pass
        case "fork":
            async with client.fork(episode, count=2, view=TREE):
                pass
        case "checkpoint":
            async with client.reset_group(checkpoint, size=2, view=TREE):
                pass
        case "rollback":
            await episode.rollback(checkpoint, view=TREE)


@pytest.mark.parametrize("moment", ["forked", "observed"])
@pytest.mark.parametrize("way", ["group", "fork", "checkpoint", "rollback"])
async def test_a_machine_that_dies_fails_the_call_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, moment: str
) -> None:
    store = CheckpointStore(tmp_path, settings=CheckpointsConfig(), reserve_bytes=0)
    async with served_client(checkpoints=store, size=1, capacity=4) as (server, client), client.reset(TASK) as episode:
        checkpoint = await episode.checkpoint()
        await episode.step(Click(379, 311))
        machines = server.service.machine_ids()
        fork, forks = MachinePool.fork, list[LeasedMachine]()

        async def fork_dying(*arguments: Any) -> LeasedMachine:
            leased = await fork(*arguments)
            machine = cast(FaultyMachine, leased.machine)
            # The others live, and must be released. A reset would succeed on its second machines.
            is_dying = way == "group" or not forks
            forks.append(leased)
            if not is_dying:
                return leased
            if moment == "forked":
                machine.kill("killed by the test")
            else:
                machine.faults = replace(machine.faults, die_after_commands=0)
            return leased

        with monkeypatch.context() as patched:
            patched.setattr(MachinePool, "fork", fork_dying)
            with pytest.raises(MachineLost if way == "group" else SetupFailed):
                await start(way, client, episode, checkpoint)
        assert server.service.machine_ids() == machines
        statistics = server.pool.statistics()
        assert (statistics.leased_count, statistics.reserved_count) == (1, 0)
        assert (episode.epoch, episode.step_count) == (1, 1)
        assert (await episode.step(Click(82, 86))).step_count == 2
    assert server.hypervisor.host.captures == {}
