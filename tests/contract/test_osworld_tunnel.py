"""The tunnel to the guest's service, with a real shell, a real service and real HTTP clients."""

import io
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from envd.integrations.osworld.tunnel import GuestTunnel, read_request
from tests.support.local_guestd import LocalGuestd, serve_guestd


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGuestd]:
    with ExitStack() as stack:
        yield serve_guestd(stack, tmp_path_factory.mktemp("guest") / "home")


@pytest.fixture
def tunnel(guest: LocalGuestd) -> Iterator[GuestTunnel]:
    # This "guest" shares the host's ports, so its service is not on 5000.
    port = int(guest.url.rpartition(":")[2])

    def run(argv: tuple[str, ...], stdin: bytes) -> bytes:
        return subprocess.run(argv, input=stdin, stdout=subprocess.PIPE, check=False).stdout

    tunnel = GuestTunnel(run, guest_port=port)
    yield tunnel
    tunnel.close()


def ask(tunnel: GuestTunnel, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of a response."""
    url = f"http://127.0.0.1:{tunnel.port}{path}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=named)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_request_is_answered_by_the_guest(tunnel: GuestTunnel) -> None:
    assert ask(tunnel, "/platform") == (200, b"Linux")


def test_large_bodies_arrive_complete_in_both_directions(tunnel: GuestTunnel, guest: LocalGuestd) -> None:
    content = bytes(range(256)) * 4096
    boundary = "between"
    parts = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file_path"\r\n\r\n{guest.home}/there\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file_data"; filename="x"\r\n\r\n'
    ).encode()
    body = parts + content + f"\r\n--{boundary}--\r\n".encode()
    status, _ = ask(tunnel, "/setup/upload", body, Content_Type=f"multipart/form-data; boundary={boundary}")
    assert status == 200
    assert (guest.home / "there").read_bytes() == content
    assert ask(tunnel, "/file", f"file_path={guest.home}/there".encode()) == (200, content)


def test_an_error_response_of_the_guest_is_forwarded(tunnel: GuestTunnel) -> None:
    status, _ = ask(tunnel, "/file", b"file_path=/no/such/file")
    assert status == 404


def test_an_unreachable_guest_is_a_bad_gateway() -> None:
    def run(argv: tuple[str, ...], stdin: bytes) -> bytes:
        assert argv[-1] == "8080"
        raise OSError("the machine is gone")

    tunnel = GuestTunnel(run, guest_port=8080)
    assert ask(tunnel, "/platform") == (502, b"the machine is gone")
    tunnel.close()


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: a lot\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nshort",
        b"POST / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"",
    ],
)
def test_a_request_without_a_bounded_length_is_rejected(head: bytes) -> None:
    with pytest.raises(ValueError, match=r"Content-Length|at most|before its body|too many"):
        read_request(io.BytesIO(head))


def test_a_request_closes_its_connection() -> None:
    request = b"GET / HTTP/1.1\r\nConnection: keep-alive\r\nHost: x\r\n\r\n"
    assert read_request(io.BytesIO(request)) == b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
