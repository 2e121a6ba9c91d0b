"""Which host opens the next episodes, and what follows an error."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv import client
from cuaenv.client import Pool
from cuaenv.client.placement import HostLoad, choose, load_of, next_attempt

SEEDS = st.integers(0, 2**32 - 1).map(random.Random)
LOADS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=1),
    st.builds(HostLoad, st.integers(0, 64), st.integers(-64, 64)),
    min_size=1,
)


def pool(
    name: str = "linux",
    *,
    capacity: int = 8,
    idle: int = 0,
    leased: int = 0,
    dying: int = 0,
    waiting: int = 0,
    parked: int = 0,
    is_failing: bool = False,
) -> Pool:
    return Pool(
        name=name,
        image="desktop",
        accelerator="fake",
        capacity=capacity,
        idle_count=idle,
        leased_count=leased,
        dying_count=dying,
        waiting_count=waiting,
        parked_count=parked,
        is_failing=is_failing,
        problem="",
        host="h:1",
    )


# The load of a host


def test_room_is_the_capacity_that_nothing_uses_or_awaits() -> None:
    assert load_of([pool(capacity=8, leased=3, dying=1, waiting=2)]) == HostLoad(8, 2)
    assert load_of([pool(capacity=300, leased=24, parked=270)]) == HostLoad(300, 6)
    assert load_of([pool(capacity=8)], unseen_count=3) == HostLoad(8, 5), "requested since the last report"
    assert load_of([pool(capacity=8, idle=1, leased=2, is_failing=True)]).room == 1
    assert load_of([pool(capacity=8, leased=2, is_failing=True)]).room == 0


def test_only_the_requested_pool_counts() -> None:
    pools = [pool("linux", capacity=8), pool("windows", capacity=4, leased=1)]
    assert load_of(pools, pool="windows") == HostLoad(4, 3)
    assert load_of(pools) == HostLoad(12, 11)
    assert load_of(pools, pool="none") == HostLoad(0, 0)


# The choice


@given(loads=LOADS, size=st.integers(1, 64), rng=SEEDS)
def test_a_host_with_room_is_chosen_if_there_is_one(loads: dict[str, HostLoad], size: int, rng: random.Random) -> None:
    chosen = choose(loads, size=size, rng=rng)
    assert chosen in loads
    if any(load.room >= size and load.capacity >= size for load in loads.values()):
        assert loads[chosen].room >= size


@given(loads=LOADS, size=st.integers(1, 64), rng=SEEDS)
def test_a_host_too_small_for_the_group_is_a_last_resort(
    loads: dict[str, HostLoad], size: int, rng: random.Random
) -> None:
    chosen = choose(loads, size=size, rng=rng)
    if any(load.capacity >= size for load in loads.values()):
        assert chosen is not None
        assert loads[chosen].capacity >= size


@given(a=st.integers(1, 64), b=st.integers(1, 64), free_a=st.floats(0, 1), free_b=st.floats(0, 1), rng=SEEDS)
def test_of_two_hosts_the_freer_one_is_chosen(a: int, b: int, free_a: float, free_b: float, rng: random.Random) -> None:
    loads = {"a": HostLoad(a, max(1, round(a * free_a))), "b": HostLoad(b, max(1, round(b * free_b)))}
    chosen = choose(loads, size=1, rng=rng)
    assert chosen is not None
    assert loads[chosen].free_share == max(load.free_share for load in loads.values())


@given(loads=LOADS, rng=SEEDS)
def test_the_worst_of_three_or_more_hosts_is_never_chosen(loads: dict[str, HostLoad], rng: random.Random) -> None:
    shares = sorted(load.free_share for load in loads.values() if load.room >= 1 and load.capacity >= 1)
    chosen = choose(loads, size=1, rng=rng)
    if len(shares) >= 2 and shares[0] < shares[1]:
        assert chosen is not None
        assert loads[chosen].free_share > shares[0]


@given(capacities=st.lists(st.integers(1, 40), min_size=2, max_size=6), rng=SEEDS)
def test_all_hosts_fill_up_before_any_episode_waits(capacities: list[int], rng: random.Random) -> None:
    leased: Counter[int] = Counter()
    for _ in range(sum(capacities)):
        loads = {host: HostLoad(capacity, capacity - leased[host]) for host, capacity in enumerate(capacities)}
        chosen = choose(loads, size=1, rng=rng)
        assert chosen is not None
        leased[chosen] += 1
    assert [leased[host] for host in range(len(capacities))] == capacities


@given(small=st.integers(4, 20), times=st.integers(1, 8), share=st.floats(0.1, 0.9), rng=SEEDS)
def test_two_unequal_hosts_are_filled_in_proportion(small: int, times: int, share: float, rng: random.Random) -> None:
    capacities = {"small": small, "large": small * times}
    leased: Counter[str] = Counter()
    for _ in range(round(share * sum(capacities.values()))):
        chosen = choose({host: HostLoad(c, c - leased[host]) for host, c in capacities.items()}, size=1, rng=rng)
        assert chosen is not None
        leased[chosen] += 1
    fractions = {host: leased[host] / capacity for host, capacity in capacities.items()}
    assert abs(fractions["small"] - fractions["large"]) <= 1 / small + 1e-9  # one machine of the smaller


def test_the_larger_of_two_empty_hosts_is_chosen_and_of_none_none() -> None:
    loads = {"small": HostLoad(4, 4), "large": HostLoad(8, 8)}
    assert {choose(loads, size=1, rng=random.Random(seed)) for seed in range(20)} == {"large"}
    assert choose({}, size=1, rng=random.Random()) is None


def test_trainers_with_old_figures_do_not_all_choose_the_best_host() -> None:
    rng = random.Random(7)
    loads = {f"h{i}": HostLoad(10, 10 - i) for i in range(5)}
    chosen = Counter(choose(loads, size=1, rng=rng) for _ in range(1000))
    assert chosen["h0"] < 600
    assert len(chosen) == 4


# After an error


@pytest.mark.parametrize(
    ("error", "following"),
    [
        (client.PoolExhausted("x", reason="POOL_EXHAUSTED"), "later"),
        (client.RateLimited("x", reason="RATE_LIMITED"), "later"),
        (client.Unavailable("x", reason="POOL_FAILING"), "later"),
        (client.Draining("x", reason="DRAINING"), "later"),
        (client.GroupTooLarge("x", reason="GROUP_TOO_LARGE"), "elsewhere"),
        (client.TaskNotFound("x", reason="TASK_NOT_FOUND"), "elsewhere"),
        (client.NotFound("x", reason="POOL_NOT_FOUND"), "elsewhere"),
        (client.Unavailable("connection refused"), "unknown"),
        (client.DeadlineExceeded("x"), "unknown"),
        (client.BadRequest("x", reason="BAD_FIELD"), "nowhere"),
        (client.Unauthenticated("x", reason="UNAUTHENTICATED"), "nowhere"),
        (client.SetupFailed("x", reason="SETUP_FAILED"), "nowhere"),
        (client.MachineLost("x", reason="MACHINE_LOST"), "elsewhere"),
        (client.SampleVoid("x", reason="STORE_ERROR"), "elsewhere"),
        (client.SampleVoid("x"), "nowhere"),
        (client.ClientClosed("x"), "nowhere"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_decides_where_the_next_attempt_goes(error: client.EnvError, following: str) -> None:
    assert next_attempt(error) is following
