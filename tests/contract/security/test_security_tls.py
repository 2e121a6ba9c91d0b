"""TLS over real sockets: certificates of servers and clients, their renewal, and addresses that need them."""

import asyncio
import logging
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cuaenv import client as trainer
from cuaenv.client import AsyncEnvClient, EnvClient, RetryPolicy, Tls
from envd.api.server import ApiServer
from envd.base.config import SecurityConfig
from envd.base.errors import ConfigError
from envd.base.telemetry.metrics import Metrics
from envd.cli.certs import make_development_certs, write_certs
from tests.support.callers import HASTY, Certs, Tokens, serving
from tests.support.stub_episodes import StubEpisodes

#: On a slow host the deadline passes before the handshake fails.
NOT_CONNECTED = (trainer.Unavailable, trainer.DeadlineExceeded)


def tls_of(certs: Certs, **limits: Any) -> SecurityConfig:
    return SecurityConfig(tls_cert=certs["server"], tls_key=certs["server_key"], **limits)


async def test_a_client_that_trusts_the_ca_is_served_over_tls(certs: Certs) -> None:
    async with (
        serving(tls_of(certs)) as (episodes, address),
        AsyncEnvClient(address, tls=Tls(ca=certs["ca"])) as client,
        client.reset("desktop/note"),
    ):
        assert [info.spec.owner for info in episodes.list_episodes()] == [""]


async def test_the_synchronous_client_supports_tls_with_a_token(certs: Certs, tokens: Tokens) -> None:
    def work(address: str) -> str:
        with (
            EnvClient(address, tls=Tls(ca=certs["ca"]), token=tokens.alice.secret) as client,
            client.reset("desktop/note") as episode,
        ):
            return episode.episode_id

    async with serving(tls_of(certs, tokens_file=tokens.path)) as (episodes, address):
        assert [await asyncio.to_thread(work, address)] == episodes.closed
        assert [command.owner for command in episodes.resets] == ["alice"]


async def test_a_client_does_not_connect_to_a_server_of_an_untrusted_authority(
    certs: Certs, foreign: Certs, tokens: Tokens
) -> None:
    async with serving(tls_of(certs, tokens_file=tokens.path)) as (episodes, address):
        client = AsyncEnvClient(address, tls=Tls(ca=foreign["ca"]), token=tokens.alice.secret, retry=HASTY)
        async with client:
            with pytest.raises(NOT_CONNECTED):
                await client.list_pools(timeout=timedelta(seconds=0.5))
        assert episodes.calls == []


async def test_clear_text_is_not_served_when_tls_is_on(certs: Certs) -> None:
    async with serving(tls_of(certs)) as (_, address), AsyncEnvClient(address, retry=HASTY) as client:
        with pytest.raises(NOT_CONNECTED):
            await client.list_pools(timeout=timedelta(seconds=0.5))


async def test_tls_on_one_side_only_is_named(certs: Certs, foreign: Certs) -> None:
    impatient = RetryPolicy(connect_timeout=timedelta(milliseconds=50))
    async with serving(tls_of(certs)) as (_, encrypted), serving(SecurityConfig()) as (_, clear):
        cases: list[tuple[str, Tls | None, str]] = [
            (encrypted, None, r"may require TLS: pass tls=Tls\("),
            (encrypted, Tls(ca=foreign["ca"]), "did not sign the daemon's certificate"),
            (clear, Tls(ca=certs["ca"]), "does not speak TLS: leave out tls="),
        ]
        for target, tls, remedy in cases:
            async with AsyncEnvClient(target, tls=tls, retry=impatient) as client:
                with pytest.raises(trainer.Unreachable, match=remedy):
                    await client.list_pools()


def for_servers_only(certs: Certs, directory: Path) -> Tls:
    """Return a certificate of the authority that is not for clients; those of `envd certs` are for both."""
    authority = x509.load_pem_x509_certificate(certs["ca"].read_bytes())
    signer = load_pem_private_key(certs["ca_key"].read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    files = directory / "server-only.pem", directory / "server-only.key"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Tls(ca=certs["ca"], cert=files[0], key=files[1])


@pytest.mark.parametrize("shown", ["none", "foreign", "servers"])
async def test_a_client_without_a_certificate_of_the_authority_cannot_connect(
    certs: Certs, foreign: Certs, shown: str, tmp_path: Path
) -> None:
    ours = {
        "none": Tls(ca=certs["ca"]),
        "foreign": Tls(ca=certs["ca"], cert=foreign["client"], key=foreign["client_key"]),
        # Right authority, wrong purpose: a server's certificate does not authenticate a client.
        "servers": for_servers_only(certs, tmp_path),
    }
    async with serving(tls_of(certs, client_ca=certs["ca"])) as (_, address):
        good = Tls(ca=certs["ca"], cert=certs["client"], key=certs["client_key"])
        async with AsyncEnvClient(address, tls=good) as client:
            assert await client.list_pools() == []
        async with AsyncEnvClient(address, tls=ours[shown], retry=HASTY) as client:
            with pytest.raises(NOT_CONNECTED):
                await client.list_pools(timeout=timedelta(seconds=0.5))


async def test_a_client_certificate_does_not_replace_a_token(certs: Certs, tokens: Tokens) -> None:
    security = tls_of(certs, client_ca=certs["ca"], tokens_file=tokens.path)
    tls = Tls(ca=certs["ca"], cert=certs["client"], key=certs["client_key"])
    async with serving(security) as (_, address):
        async with AsyncEnvClient(address, tls=tls) as client:
            with pytest.raises(trainer.Unauthenticated):
                await client.list_pools()
        async with AsyncEnvClient(address, tls=tls, token=tokens.viewer.secret) as client:
            assert await client.list_pools() == []


async def certificate_at(address: str) -> x509.Certificate:
    """Return the certificate that the server presents to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(shown)


async def test_a_new_certificate_is_used_without_a_restart_and_an_invalid_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    stale = {"setting": "tls_cert"}
    files = write_certs(tmp_path, make_development_certs([], now=datetime.now(UTC)))
    async with serving(tls_of(files), metrics=metrics) as (_, address):
        before = await certificate_at(address)
        renewed = make_development_certs([], now=datetime.now(UTC))
        files["server"].write_bytes(renewed["server"])
        # Only half of the pair is new: the old pair stays in use, and an error is logged.
        with caplog.at_level(logging.ERROR):
            assert await certificate_at(address) == before
        assert "are not a PEM certificate and its key" in caplog.text
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 1
        files["server_key"].write_bytes(renewed["server_key"])
        assert await certificate_at(address) == x509.load_pem_x509_certificate(renewed["server"])
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 0


@pytest.mark.parametrize("wrong", ["pair", "key", "readable key", "ca", "empty ca", "missing"])
def test_invalid_certificates_fail_the_start(tmp_path: Path, certs: Certs, foreign: Certs, wrong: str) -> None:
    key, ca = tmp_path / "key", tmp_path / "ca"
    key.touch(mode=0o600)
    key.write_bytes(certs["server_key"].read_bytes())
    ca.write_bytes(certs["ca"].read_bytes())
    match wrong:
        case "pair":
            key.write_bytes(foreign["server_key"].read_bytes())
        case "key":
            key.write_text("no key")
        case "readable key":
            key.chmod(0o644)
        case "ca":
            ca.write_text("no certificate")
        case "empty ca":
            ca.write_text("")
        case "missing":
            ca.unlink()
    security = SecurityConfig(tls_cert=certs["server"], tls_key=key, client_ca=ca)
    with pytest.raises(ConfigError, match=r"^security\.(tls_cert|tls_key|client_ca)[:,] ") as caught:
        ApiServer(StubEpisodes(), listen="127.0.0.1:0", metrics=Metrics(), security=security)
    assert "PRIVATE KEY" not in str(caught.value)


async def test_an_address_reachable_from_other_hosts_is_served_over_tls_with_tokens(
    certs: Certs, tokens: Tokens
) -> None:
    security = tls_of(certs, tokens_file=tokens.path)
    async with serving(security, listen="0.0.0.0:0") as (_, address):
        port = address.rpartition(":")[2]
        async with AsyncEnvClient(f"127.0.0.1:{port}", tls=Tls(ca=certs["ca"]), token=tokens.viewer.secret) as client:
            assert await client.list_pools() == []


@pytest.mark.parametrize("missing", ["everything", "callers", "tls"])
def test_an_address_that_other_hosts_can_reach_requires_tls_and_authentication(
    certs: Certs, tokens: Tokens, missing: str
) -> None:
    security = {"everything": SecurityConfig(), "callers": tls_of(certs), "tls": tokens.security()}[missing]
    with pytest.raises(ConfigError, match=r"security\.tls_cert"):
        ApiServer(StubEpisodes(), listen="0.0.0.0:0", metrics=Metrics(), security=security)


async def test_two_servers_cannot_share_a_port_over_tls(certs: Certs) -> None:
    async with serving(tls_of(certs)) as (_, address):
        second = ApiServer(StubEpisodes(), listen=address, metrics=Metrics(), security=tls_of(certs))
        with pytest.raises(ConfigError, match="bound"):
            await second.start()


async def test_a_resolved_address_must_present_a_certificate_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    files = write_certs(tmp_path / "named", make_development_certs(["pool.example.org"], now=datetime.now(UTC)))
    async with serving(tls_of(files)) as (_, address):
        port = address.rpartition(":")[2]
        tls = Tls(ca=files["ca"])
        async with AsyncEnvClient(f"dns:///pool.example.org:{port}", tls=tls, retry=HASTY) as client:
            assert len(await client.list_tasks()) == 3
        # Its certificate is valid for 127.0.0.1, but not for this name.
        async with AsyncEnvClient(f"dns:///other.example.org:{port}", tls=tls, retry=HASTY) as client:
            with pytest.raises(NOT_CONNECTED):
                await client.list_tasks(timeout=timedelta(seconds=1))
