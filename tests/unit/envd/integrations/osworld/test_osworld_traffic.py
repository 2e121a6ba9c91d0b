"""Responses of a guest that say that they are incomplete."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import requests

from envd.integrations.osworld.worker.traffic import GuestTraffic, incompleteness


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"AT": '<desktop-frame truncated="true" />'}, "the accessibility tree is incomplete"),
        ({"AT": '<desktop-frame xmlns:st="https://x/" truncated="true"><a/></desktop-frame>'}, "tree is incomplete"),
        ({"output": "a", "error": "", "returncode": 0, "truncated": True}, "the output of a command is incomplete"),
        ({"output": "a" * (16 << 20), "error": ""}, "the output of a command is incomplete"),
        ({"directory_tree": {"type": "directory", "children": [], "truncated": True}}, "too many entries"),
        ({"directory_tree": {"type": "directory", "children": [{"error": "Permission denied"}]}}, "Permission denied"),
        ({"directory_tree": {"error": "Permission denied"}}, "the list of a directory is incomplete"),
    ],
)
def test_an_incomplete_response_is_recognised(body: dict[str, object], problem: str) -> None:
    assert problem in incompleteness(json.dumps(body))


@pytest.mark.parametrize(
    "body",
    [
        {"AT": '<desktop-frame><label name="truncated=&quot;true&quot;" /></desktop-frame>'},
        {"AT": '<desktop-frame><text truncated="true" /></desktop-frame>'},
        {"output": "a", "error": "", "returncode": 1},
        {"directory_tree": {"type": "directory", "children": [{"type": "file", "name": "error"}]}},
        {"output": None, "status": "success"},
        [],
        "text",
    ],
)
def test_a_complete_response_is_not_taken_for_incomplete(body: object) -> None:
    assert incompleteness(json.dumps(body)) == ""


def test_a_response_that_is_not_json_says_nothing() -> None:
    assert incompleteness("<html>") == ""


URL = "http://127.0.0.1:5000"


def asked(route: str, responses: dict[str, tuple[int, object]]) -> GuestTraffic:
    """Return what is noted of a request to a guest with these responses, by route."""

    class Session:
        def request(self, method: str, url: str, **_: Any) -> SimpleNamespace:
            status, body = responses[url.removeprefix(URL)]
            return SimpleNamespace(status_code=status, text=json.dumps(body))

    library: Any = ModuleType("requests")
    library.sessions = SimpleNamespace(Session=Session)
    traffic = GuestTraffic(URL)
    traffic.watch(library)
    library.sessions.Session().request("post", URL + route)
    return traffic


SHOWN = '<desktop-frame><frame><terminal name="Terminal" st:showing="true" /></frame></desktop-frame>'
NO_TEXT = {"output": None, "status": "success"}


@pytest.mark.parametrize(
    "tree",
    [
        (200, {"AT": '<desktop-frame truncated="true" />'}),
        (200, {"AT": SHOWN}),
        (500, {"message": "accessibility: no answer in time"}),
    ],
)
def test_a_terminal_without_text_must_not_be_due_to_an_incomplete_tree(tree: tuple[int, object]) -> None:
    traffic = asked("/terminal", {"/terminal": (200, NO_TEXT), "/accessibility": tree})
    assert "the text of a terminal is missing" in traffic.broken


@pytest.mark.parametrize("tree", ["<desktop-frame />", '<desktop-frame><terminal name="behind" /></desktop-frame>'])
def test_no_terminal_is_a_fact(tree: str) -> None:
    responses: dict[str, tuple[int, object]] = {"/terminal": (200, NO_TEXT), "/accessibility": (200, {"AT": tree})}
    assert asked("/terminal", responses).broken == ""
    assert asked("/terminal", {"/terminal": (200, {"output": "", "status": "success"})}).broken == ""


@pytest.mark.parametrize("number", [11, 12, 23, 24, 28])
def test_a_guest_without_resources_to_start_a_command_gives_no_score(number: int) -> None:
    message = f"['ls'] cannot be started: [Errno {number}] Cannot allocate memory"
    assert asked("/execute", {"/execute": (500, {"message": message})}).broken


def test_a_command_that_does_not_exist_is_a_fact_and_an_unknown_route_is_a_fault() -> None:
    missing = {"message": "['nope'] cannot be started: [Errno 2] No such file or directory: 'nope'"}
    traffic = asked("/execute", {"/execute": (500, missing)})
    assert (traffic.broken, bool(traffic.refused)) == ("", True)
    traffic = asked("/new", {"/new": (404, {"message": "POST /new: no such route"})})
    assert (bool(traffic.broken), traffic.absent) == (True, "")


@contextmanager
def guest_with_a_file(size_bytes: int) -> Iterator[tuple[str, list[int]]]:
    """Serve zeros at each route; yield the URL and a list of the bytes that were sent."""
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(size_bytes))
            self.end_headers()
            with suppress(ConnectionError):
                while sum(sent) < size_bytes:
                    sent.append(self.wfile.write(bytes(min(1 << 16, size_bytes - sum(sent)))))

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", sent
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(("size_bytes", "status"), [(200_000, 200), (1 << 30, 404)])
def test_a_file_of_1_gib_in_place_of_a_document_counts_as_missing_and_stays_there(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, status: int
) -> None:
    monkeypatch.setattr(requests.sessions.Session, "request", requests.sessions.Session.request)
    with guest_with_a_file(size_bytes) as (url, sent):
        traffic = GuestTraffic(url)
        traffic.watch(requests)
        response = requests.post(f"{url}/file", data={"file_path": "/home/user/a.docx"})  # noqa: S113 -- has one
    assert (response.status_code, traffic.broken) == (status, "")
    assert bool(traffic.absent) is (status == 404)
    if status == 200:
        assert response.content == bytes(size_bytes)
    assert sum(sent) < (64 << 20)  # what the buffers of a connection take
