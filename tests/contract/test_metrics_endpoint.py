"""The endpoint of metrics, and its HTTPS, tokens and client certificates."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from envd.api.security.access import Scope
from envd.api.security.http import require_token, tls_context
from envd.api.security.secret_files import Reloaded
from envd.api.security.tokens import new_token, read_tokens
from envd.base.config import SecurityConfig
from envd.base.errors import ConfigError
from envd.base.telemetry import endpoint
from envd.base.telemetry.endpoint import serve_metrics
from envd.base.telemetry.metrics import Metrics
from envd.cli.certs import make_development_certs

CERTS = make_development_certs(["localhost"], now=datetime.now(UTC))


def write(directory: Path, certs: Mapping[str, bytes], **more: Any) -> SecurityConfig:
    """Write a server's certificate, and the CA."""
    files = {"server.pem": certs["server"], "server.key": certs["server_key"], "ca.pem": certs["ca"]}
    for name, content in files.items():
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o600)
    return SecurityConfig(tls_cert=directory / "server.pem", tls_key=directory / "server.key", **more)


@asynccontextmanager
async def served(security: SecurityConfig) -> AsyncIterator[str]:
    path = security.tokens_file
    tokens = Reloaded("tokens", [path], lambda: read_tokens(path), on_stale=lambda _: None) if path else None
    context = tls_context(security, on_stale=lambda _: None)
    check = require_token(tokens, Scope.RUN, exempt=["/healthz"])
    async with serve_metrics(Metrics(), "127.0.0.1:0", tls=context, middlewares=[check]) as address:
        yield f"https://localhost:{address.rpartition(':')[2]}"


async def get(url: str, *, ca: bytes = CERTS["ca"], token: str = "", cert: tuple[Path, Path] | None = None) -> int:
    """Return the status of a request on a connection of its own."""
    context = ssl.create_default_context(cadata=ca.decode())
    if cert is not None:
        context.load_cert_chain(*cert)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context, headers=headers) as response:
        await response.read()
        return response.status


async def test_a_scrape_needs_a_valid_token_of_sufficient_scope(tmp_path: Path) -> None:
    run, read = new_token("trainer", "run"), new_token("prometheus", "read")
    file = tmp_path / "tokens"
    file.write_text(f"{run.line}\n{read.line}\n")
    file.chmod(0o600)
    async with served(write(tmp_path, CERTS, tokens_file=file)) as url:
        assert await get(f"{url}/metrics", token=run.secret) == 200
        assert await get(f"{url}/metrics", token=read.secret) == 403
        assert await get(f"{url}/metrics", token=run.secret + "x") == 401
        assert await get(f"{url}/metrics") == 401
        assert await get(f"{url}/healthz") == 200


async def test_a_client_certificate_is_required_where_an_authority_is_set(tmp_path: Path) -> None:
    security = write(tmp_path, CERTS, client_ca=tmp_path / "ca.pem")
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    cert.write_bytes(CERTS["client"])
    key.write_bytes(CERTS["client_key"])
    async with served(security) as url:
        assert await get(f"{url}/metrics", cert=(cert, key)) == 200
        with pytest.raises(aiohttp.ClientError):
            await get(f"{url}/metrics")


async def test_a_new_certificate_applies_to_the_next_connection(tmp_path: Path) -> None:
    async with served(write(tmp_path, CERTS)) as url:
        assert await get(f"{url}/metrics") == 200
        newer = make_development_certs(["localhost"], now=datetime.now(UTC) + timedelta(minutes=1))
        write(tmp_path, newer)
        assert await get(f"{url}/metrics", ca=newer["ca"]) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(f"{url}/metrics")


def test_a_key_of_another_certificate_is_a_configuration_error(tmp_path: Path) -> None:
    security = write(tmp_path, CERTS)
    (tmp_path / "server.key").write_bytes(CERTS["client_key"])
    with pytest.raises(ConfigError, match="are not a PEM certificate and its key"):
        tls_context(security, on_stale=lambda _: None)


async def test_the_endpoint_serves_metrics_and_liveness_and_frees_its_port() -> None:
    async with aiohttp.ClientSession() as session:
        async with serve_metrics(Metrics(), "127.0.0.1:0") as address:
            async with session.get(f"http://{address}/metrics") as response:
                assert response.status == 200
                assert response.headers["Content-Type"].startswith("text/plain; version=")
                assert "envd_event_loop_lag_seconds_count" in await response.text()
            async with session.get(f"http://{address}/healthz") as response:
                assert await response.text() == "ok\n"
        async with serve_metrics(Metrics(), address) as again:
            assert again == address


async def test_bytes_that_are_not_http_1_log_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with serve_metrics(Metrics(), "127.0.0.1:0") as address:
        for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x05hello\r\n\r\n"):
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert b"400 Bad Request" in await reader.read()
            writer.close()
    assert caplog.text == ""


async def test_connections_beyond_the_limit_are_closed_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_max_connections", lambda: 2)
    async with serve_metrics(Metrics(), "127.0.0.1:0") as address:
        host, port = address.split(":")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/healthz") as response:
                assert await response.text() == "ok\n"
            idle_reader, idle = await asyncio.open_connection(host, int(port))
            idle.write(f"GET /healthz HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            assert b"200 OK" in await idle_reader.readuntil(b"ok\n")
            reader, refused = await asyncio.open_connection(host, int(port))
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            # On the first connection, which is kept.
            async with session.get(f"http://{address}/healthz") as response:
                assert await response.text() == "ok\n"
            refused.close()
            idle.close()


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with serve_metrics(Metrics(), "127.0.0.1:0") as address:
        with pytest.raises(
            ConfigError, match=f"metrics_listen {address}: cannot be bound: address already in use; stop what"
        ):
            async with serve_metrics(Metrics(), address):
                pass
