"""The simulated host that parks episodes."""

from dataclasses import replace

import pytest

from tests.simulation.parked import ParkingHost, most_episodes, simulate_parking
from tests.simulation.scenario import Durations, Spread

HOST = ParkingHost(
    episode_count=8,
    machine_count=8,
    ready_count=0,
    core_count=4,
    think_s=10.0,
    durations=Durations(step=Spread(0.4, 0.4), park=Spread(0.2, 0.2), resume=Spread(0.1, 0.1)),
)


def test_episodes_that_fit_in_memory_are_not_parked() -> None:
    found = simulate_parking(HOST)
    assert found.parked_share == 0.0
    assert found.p50_s == pytest.approx(0.4)


def test_a_parked_episode_waits_for_the_parking_of_another_and_for_its_own_state() -> None:
    host = replace(HOST, episode_count=32, core_count=32)
    found = simulate_parking(host)
    assert 0.5 < found.parked_share <= 1.0
    assert found.p50_s == pytest.approx(0.7)
    # A machine that is ready takes the first wait away.
    assert simulate_parking(replace(host, ready_count=4)).p50_s == pytest.approx(0.5)


def test_a_host_that_falls_behind_has_slow_steps_and_finishes_some() -> None:
    found = simulate_parking(replace(HOST, episode_count=200, core_count=1))
    assert found.p50_s > 10.0


def test_longer_thinking_allows_more_episodes_until_the_cores_are_busy() -> None:
    ready = replace(HOST, ready_count=2)
    counts = [most_episodes(replace(ready, think_s=think_s), at_most=500) for think_s in (5.0, 20.0)]
    assert 8 < counts[0] < counts[1]
    # A step and the moves of its episode take 0.7 s of a core, and there are four.
    assert counts[1] <= 4 / 0.7 * 20.4
