"""A small HTTPS site on loopback: pages, a cookie, a redirect, a form and a download; and a client that visits it."""

import http.client
import http.cookiejar
import http.server
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from envd.cli.certs import make_development_certs

DOWNLOAD = bytes(range(256)) * 2048
#: An hour after a recording whose dates the test sets to that morning.
LONG_AGO = "Mon, 01 Jan 2001 10:00:00 GMT"


class _Site(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    visit_count = 0

    def do_GET(self) -> None:
        if self.path == "/start":
            return self._send(302, b"", ("Location", "/home"), ("Set-Cookie", f"seen=1; Expires={LONG_AGO}; Path=/"))
        if self.path == "/home":
            name = "someone" if "user=" in self.headers.get("Cookie", "") else "a stranger"
            return self._send(200, f"<h1>Hello, {name}</h1>".encode())
        if self.path == "/random":
            type(self).visit_count += 1
            return self._send(200, f"visit {self.visit_count}".encode(), ("Cache-Control", "no-cache"))
        if self.path == "/socket":
            self.close_connection = True
            return self._send(101, b"", ("Upgrade", "websocket"), ("Connection", "Upgrade"))
        if self.path == "/file.bin":
            return self._send(200, DOWNLOAD, ("Content-Disposition", "attachment"))
        return self._send(404, b"no such page")

    def do_POST(self) -> None:
        name = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._send(303, b"", ("Location", "/home"), ("Set-Cookie", f"user={name.partition('=')[2]}; Path=/"))

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for header in (("Content-Type", "text/html"), ("Content-Length", str(len(body))), *headers):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_site(directory: Path) -> Iterator[int]:
    """Serve the site during the block; yield its port. `ca.pem` in the directory is its authority."""
    certs = make_development_certs([], now=datetime.now(UTC))
    (directory / "ca.pem").write_bytes(certs["ca"])
    (directory / "site.pem").write_bytes(certs["server"] + certs["server_key"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "site.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def open_socket(proxy: str, authority: str, site: str) -> tuple[int, bytes]:
    """Ask a site for a WebSocket through a proxy; return the status, and the body unless it was opened."""
    context = ssl.create_default_context(cadata=authority)
    connection = http.client.HTTPSConnection(urlsplit(proxy).netloc, context=context)
    connection.set_tunnel(urlsplit(site).netloc)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    connection.request("GET", "/socket", headers=headers | {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    with closing(connection):
        response = connection.getresponse()
        return response.status, b"" if response.status == 101 else response.read()


class Visitor:
    """A client with cookies that uses a proxy and trusts one authority."""

    def __init__(self, proxy: str, authority: str) -> None:
        self.cookies = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({"http": proxy, "https": proxy}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authority)),
            urllib.request.HTTPCookieProcessor(self.cookies),
        )

    def open(self, url: str, body: bytes | None = None) -> tuple[int, str, bytes]:
        """Return status, final URL and body."""
        try:
            with self._opener.open(url, body, timeout=60) as answer:
                return answer.status, answer.url, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, url, error.read()

    def tour(self, site: str) -> list[tuple[int, str, bytes]]:
        """Visit the whole site."""
        paths = (("/start", None), ("/home", None), ("/login", b"name=ann"), ("/random", None), ("/file.bin", None))
        return [self.open(f"{site}{path}", body) for path, body in (*paths, ("/missing", None))]
