"""Which of several connections to a daemon serves an episode."""

from dataclasses import dataclass

import pytest
from cuaenv.client.routes import FIRST, Routes


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def routes(clock: Clock) -> Routes:
    return Routes(clock)


def relayed(routes: Routes, episode_id: str, process: str) -> bool:
    """Relay a call about an episode."""
    return routes.note_relay(episode_id, connection=routes.connection_of(episode_id), process=process)


def test_without_a_relay_all_calls_use_the_first_connection(routes: Routes) -> None:
    routes.note_direct("ep-1")
    assert routes.connection_of("") == routes.connection_of("ep-1") == FIRST
    assert routes.connections == {FIRST}


def test_a_relayed_call_moves_all_episodes_of_its_process_to_another_connection(routes: Routes) -> None:
    assert relayed(routes, "ep-a", "1")
    found = routes.connection_of("ep-a")
    assert found != FIRST
    assert routes.connection_of("ep-b") == FIRST
    # Its first call, over the first connection, shows the process that it belongs to.
    assert not relayed(routes, "ep-b", "1")
    assert routes.connection_of("ep-b") == found
    assert relayed(routes, "ep-c", "2")
    assert len(routes.connections) == 3


def test_connections_that_are_not_used_are_not_named(routes: Routes) -> None:
    for _ in range(5):
        assert relayed(routes, "ep-a", "1")
    assert routes.connections == {FIRST, routes.connection_of("ep-a")}


def test_responses_that_arrive_late_do_not_replace_a_connection(routes: Routes) -> None:
    assert relayed(routes, "ep-a", "1")
    found = routes.connection_of("ep-a")
    assert not routes.note_relay("ep-a", connection=FIRST, process="1")
    assert routes.connection_of("ep-a") == found


def test_after_many_tries_connections_are_tried_at_an_interval_until_one_reaches_the_process(
    routes: Routes, clock: Clock
) -> None:
    assert [relayed(routes, "ep-a", "1") for _ in range(20)] == [True] * 16 + [False] * 4
    clock.now_s += 10.0
    assert [relayed(routes, "ep-a", "1") for _ in range(2)] == [True, False]
    routes.note_direct("ep-a")
    # The process was restarted.
    assert [relayed(routes, "ep-a", "1") for _ in range(20)] == [True] * 16 + [False] * 4


def test_a_closed_episode_is_forgotten_and_its_process_is_not(routes: Routes) -> None:
    relayed(routes, "ep-a", "1")
    found = routes.connection_of("ep-a")
    routes.forget("ep-a")
    assert routes.connection_of("ep-a") == FIRST
    relayed(routes, "ep-b", "1")
    assert routes.connection_of("ep-b") == found
