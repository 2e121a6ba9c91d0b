"""Deduplication of requests, and locks with a timeout."""

import pytest

from envd.guests.guestd.messages import HttpError, Request, Response, json_response
from envd.guests.guestd.processes import TimedLock
from envd.guests.guestd.server import Replays


def request(body: bytes = b"{}", path: str = "/execute") -> Request:
    return Request(path, {}, "application/json", body)


def test_reusing_an_id_with_another_body_is_an_error() -> None:
    replays = Replays()
    replays.respond(request(b"1"), "id", lambda: json_response(1))
    with pytest.raises(HttpError) as raised:
        replays.respond(request(b"2"), "id", lambda: json_response(2))
    assert raised.value.status == 409


def test_a_call_that_failed_because_the_guest_was_busy_can_be_repeated() -> None:
    replays = Replays()
    replays.respond(request(), "id", lambda: json_response("busy", 503))
    assert replays.respond(request(), "id", lambda: json_response("done")).status == 200


def test_the_number_of_recorded_responses_is_bounded() -> None:
    replays = Replays(capacity=4)
    for number in range(20):
        replays.respond(request(), str(number), lambda: json_response(1))
    calls: list[int] = []

    def produce() -> Response:
        calls.append(1)
        return json_response(2)

    assert replays.respond(request(), "19", produce).body == b"1\n"
    assert replays.respond(request(), "0", produce).body == b"2\n"
    assert len(calls) == 1


def test_waiting_for_a_lock_ends_after_its_timeout() -> None:
    lock = TimedLock("the screen")
    with lock(), pytest.raises(HttpError, match="busy") as raised, lock(0.01):
        pass
    assert raised.value.status == 503
