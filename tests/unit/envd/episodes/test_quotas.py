"""Machine limits of tokens: never exceeded, and fully usable."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envd.base.errors import GroupTooLarge, TokenQuotaReached
from envd.base.store.store import Store
from envd.base.telemetry.metrics import Metrics
from envd.episodes.journal import Journal
from envd.episodes.registry import EpisodeRegistry
from tests.support.clock import ManualClock, begun, run_ready
from tests.support.episode_world import World

MAX_MACHINES = {"a": 3, "b": 5, "c": None}


class Registry(EpisodeRegistry):
    """A registry whose episodes are only counted."""

    def __init__(self, held: Counter[str]) -> None:
        clock = ManualClock()
        super().__init__(clock=clock, metrics=Metrics(), journal=Journal(Store(), clock=clock))
        self.held = held

    def machine_count(self, owner: str) -> int:
        return self.held[owner]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.sampled_from(["open", "fail", "leave open", "close"])),
        max_size=60,
    )
)
def test_an_owner_never_exceeds_its_limit_and_is_refused_only_at_the_limit(events: list[tuple[str, int, str]]) -> None:
    held: Counter[str] = Counter()
    opening_count: Counter[str] = Counter()
    left_open = []  # keep a reference, or the context manager would be closed
    registry = Registry(held)
    for owner, count, event in events:
        limit = MAX_MACHINES[owner]
        if event == "close":
            held[owner] -= min(count, held[owner])
            continue
        taking = registry.opening(owner, count, max_machines=limit)
        if limit is not None and held[owner] + opening_count[owner] + count > limit:
            with pytest.raises(GroupTooLarge if count > limit else TokenQuotaReached):
                taking.__enter__()
            continue
        taking.__enter__()
        if event == "leave open":
            opening_count[owner] += count
            left_open.append(taking)
            continue
        taking.__exit__(None, None, None)
        if event == "open":
            held[owner] += count
        assert limit is None or held[owner] + opening_count[owner] <= limit


async def test_a_reset_above_the_quota_is_refused_at_once_and_succeeds_after_an_episode_was_closed(
    world: World,
) -> None:
    first = await world.open(owner="a", group_size=1, max_machines=2)
    await world.open(owner="a", max_machines=2)
    command = world.reset_command(owner="a", max_machines=2)
    with pytest.raises(TokenQuotaReached, match=r"^token 'a': .* 2 machines, 2 .* 1 more") as refused:
        await world.service.reset(command)
    assert refused.value.retry_after_s > 0
    await world.open(owner="b", max_machines=2)
    await world.service.close(first)
    assert len((await world.service.reset(command)).episodes) == 1


async def test_waiting_resets_count_and_failed_ones_do_not(world: World) -> None:
    world.tasks.setup_gate.clear()
    opening = await begun(world.reset(owner="a", group_size=2, max_machines=2))
    with pytest.raises(TokenQuotaReached, match="2 are in use"):
        await world.reset(owner="a", max_machines=2)
    world.tasks.setup_errors.append(RuntimeError("broken"))
    world.tasks.setup_gate.set()
    with pytest.raises(RuntimeError):
        await opening
    await world.reset(owner="a", group_size=2, max_machines=2)


async def test_forks_count_for_the_owner_of_their_parent(world: World) -> None:
    parent_id = await world.open(owner="a", max_machines=2)
    with pytest.raises(TokenQuotaReached, match=r"1 are in use, and 2 more"):
        await world.fork(parent_id, fork_count=2, max_machines=2)
    await world.fork(parent_id, fork_count=1, max_machines=2)
    with pytest.raises(TokenQuotaReached):
        await world.reset(owner="a", max_machines=2)


async def test_an_episode_with_a_lost_machine_holds_none(world: World) -> None:
    lost = await world.open(owner="a", max_machines=1)
    world.kill(lost)
    await run_ready()
    await world.open(owner="a", max_machines=1)
