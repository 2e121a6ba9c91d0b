"""A real guest reaches listed hosts through the proxy on its loopback, and nothing without it."""

import http.server
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import EnvClient, View
from tests.support.real_desktops import Backend
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
allow_guest_access = true
allowed_hosts = ["127.0.0.1:{port}"]
{hypervisor}"""
#: argv: a URL, and the URL of a proxy or "". Prints the body, the error status, or "unreachable".
FETCH = """\
import os, sys, urllib.error, urllib.request
os.environ.pop("no_proxy", None)  # it lists the guest's loopback, which the test requests
proxies = {"http": sys.argv[2]} if sys.argv[2] else {}
opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
try:
    print(opener.open(sys.argv[1], timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print("unreachable")
"""
RESET_TIMEOUT = timedelta(minutes=10)
PROXY = "http://127.0.0.1:3128"


class _EchoPath(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"requested {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def origin() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _EchoPath) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


@pytest.fixture
def state_dir(short_dir: Path) -> Path:
    return short_dir / "s"


def test_a_guest_reaches_only_listed_hosts_through_its_proxy(
    state_dir: Path, real_backend: Backend, origin: int
) -> None:
    daemon = ServedDaemon(state_dir, CONFIG.format(port=origin, hypervisor=real_backend.toml))
    try:
        address = daemon.wait_for(r"listening on (\S+)", timeout_s=120)
        with (
            EnvClient(address) as client,
            client.reset("desktop/type-greeting", view=View(encoding="none"), timeout=RESET_TIMEOUT) as episode,
        ):

            def fetch(url: str, proxy: str) -> str:
                result = episode.run_command(["python3", "-c", FETCH, url, proxy])
                assert result.exit_code == 0, result.stderr
                return result.stdout.decode().strip()

            # Nothing listens on that port of the guest's own 127.0.0.1; the proxy connects from the host.
            listed = f"http://127.0.0.1:{origin}/hello"
            assert fetch(listed, PROXY) == "requested /hello"
            assert fetch(listed, "") == "unreachable"
            assert fetch("http://127.0.0.1:1/", PROXY) == "403"
            assert fetch("http://example.org/", PROXY) == "403"
            assert fetch("http://10.0.2.2/", "") == "unreachable"
            environment = episode.run_command(["printenv", "http_proxy"])
            assert environment.stdout.decode().strip() == PROXY
    finally:
        assert daemon.end() == 0
