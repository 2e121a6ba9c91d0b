"""Clients that gather slots on a host: one at a time, and hidden from the groups that wait."""

from pathlib import Path

from cuaenv.client.ray_cluster import is_gathered
from trainer.hosts.actor import HostActor, HostSettings


async def test_one_client_at_a_time_gathers_on_a_host_until_it_ends_or_its_time_is_over(tmp_path: Path) -> None:
    actor = HostActor(node="n", ip="127.0.0.1", settings=HostSettings(endpoint="127.0.0.1:1", directory=str(tmp_path)))
    assert await actor.gather("a", 60.0)
    assert not await actor.gather("b", 60.0)
    assert await actor.gather("a", 60.0)
    await actor.gather("a", 0.0)
    assert await actor.gather("b", -1.0)
    assert await actor.gather("a", 60.0)


def test_a_gathered_slot_is_not_mistaken_for_a_group() -> None:
    assert is_gathered({"envd_desktop": 1.0, "node:10.0.0.1": 0.001})
    assert not is_gathered({"envd_desktop": 8.0})
