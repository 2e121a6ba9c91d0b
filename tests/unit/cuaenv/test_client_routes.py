"""Which of several connections to a daemon serves an episode."""

from cuaenv.client.routes import MAX_CONNECTIONS, Routes


def test_without_a_relay_all_calls_use_the_first_connection() -> None:
    routes = Routes()
    assert routes.connection_of("") == 0
    assert routes.connection_of("ep-1") == 0


def test_a_relayed_call_moves_all_episodes_of_that_process_to_the_next_connection() -> None:
    routes = Routes()
    routes.note_relay("ep-a", connection=0, process="1")
    assert routes.connection_of("ep-a") == 1
    assert routes.connection_of("ep-b") == 0
    # Known by its first relayed call, although it went over another connection.
    routes.note_relay("ep-b", connection=0, process="1")
    assert routes.connection_of("ep-b") == 1
    routes.note_relay("ep-c", connection=0, process="2")
    assert [routes.connection_of(each) for each in ("ep-a", "ep-b", "ep-c")] == [1, 1, 1]


def test_connections_are_tried_in_turn_and_then_again() -> None:
    routes = Routes()
    tried = []
    for _ in range(MAX_CONNECTIONS + 1):
        tried.append(routes.connection_of("ep-a"))
        routes.note_relay("ep-a", connection=tried[-1], process="1")
    assert tried == [*range(MAX_CONNECTIONS), 0]


def test_responses_that_arrive_late_do_not_skip_a_connection() -> None:
    routes = Routes()
    for _ in range(3):
        routes.note_relay("ep-a", connection=0, process="1")
    assert routes.connection_of("ep-a") == 1


def test_a_closed_episode_is_forgotten_and_its_process_is_not() -> None:
    routes = Routes()
    routes.note_relay("ep-a", connection=0, process="1")
    routes.forget("ep-a")
    assert routes.connection_of("ep-a") == 0
    routes.note_relay("ep-b", connection=0, process="1")
    assert routes.connection_of("ep-b") == 1
