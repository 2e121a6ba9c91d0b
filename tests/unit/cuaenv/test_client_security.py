"""Where a client's token may be sent, and that it is never shown."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import AsyncEnvClient, EnvClient, RetryPolicy, Tls, Unavailable
from cuaenv.client.connection import DaemonConnection
from cuaenv.client.credentials import Access, is_local
from cuaenv.client.targets import Address

SECRET = "envd_secret-1234"  # noqa: S105 -- not a real token
LOCAL = [
    "127.0.0.1:50051",
    "127.8.8.8:1",
    "localhost:50051",
    "[::1]:50051",
    "unix:/run/envd.sock",
    "unix:///run/envd.sock",
    "dns:///localhost:50051",
    "ipv4:127.0.0.1:50051",
    "ipv6:[::1]:50051",
]
REMOTE = [
    "192.0.2.7:50051",
    "0.0.0.0:50051",
    "pool.example.org:50051",
    "localhost.example.org:50051",
    "[fe80::1]:50051",
    "dns:///pool.example.org:50051",
    "ipv4:127.0.0.1:1,192.0.2.7:1",
    "dns://8.8.8.8/localhost:1",
    "xds:///localhost:1",
    "127.0.0.1:50051,pool.example.org:50051",
]


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVD_TOKEN", raising=False)


@pytest.mark.parametrize("target", LOCAL)
def test_a_token_may_be_sent_within_the_host(target: str) -> None:
    assert is_local(target)
    assert AsyncEnvClient(target, token=SECRET).targets == (target,)


@pytest.mark.parametrize("target", REMOTE)
def test_a_token_never_leaves_the_host_in_clear_text(target: str) -> None:
    assert not is_local(target)
    with pytest.raises(ValueError, match="clear text") as caught:
        AsyncEnvClient(target, token=SECRET)
    assert SECRET not in str(caught.value)
    AsyncEnvClient(target, token=SECRET, tls=Tls(ca=Path("ca.pem")))
    AsyncEnvClient(target)


def test_the_token_is_also_checked_when_a_channel_is_opened() -> None:
    with pytest.raises(ValueError, match="in clear text"):
        Access(token=SECRET, tls=None).open_channel("192.0.2.7:1", [])


def test_the_token_comes_from_the_environment_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVD_TOKEN", f"{SECRET}\n")
    with pytest.raises(ValueError, match="in clear text"):
        AsyncEnvClient("192.0.2.7:1")
    with pytest.raises(ValueError, match="in clear text"):
        EnvClient("192.0.2.7:1")
    # An empty token is given too: none is sent.
    AsyncEnvClient("192.0.2.7:1", token="")


@pytest.mark.parametrize("token", ["two words", "line\nfeed", "tökén", "nul\0"])
def test_a_malformed_token_is_rejected_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="malformed") as caught:
        AsyncEnvClient("127.0.0.1:1", token=token)
    assert token not in str(caught.value)


async def test_the_token_is_in_no_repr_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    client = AsyncEnvClient("127.0.0.1:1", token=SECRET)
    access = Access(token=SECRET, tls=None)
    connection = DaemonConnection(Address("127.0.0.1:1"), access=access, retry=RetryPolicy())
    shown = [
        repr(thing) for thing in (client, access, connection, connection.stub(), connection.stub().Step, vars(client))
    ]
    assert repr(access) == "<Access with a token, without TLS>"
    with caplog.at_level(logging.DEBUG), pytest.raises(Unavailable) as caught:
        await client.list_pools(timeout=timedelta(seconds=1.5))
    assert "ListPools at 127.0.0.1:1" in caplog.text
    assert SECRET not in "".join([*shown, caplog.text, str(caught.value), repr(caught.value)])
    await client.aclose()
    await connection.aclose()


def test_a_client_certificate_requires_its_key() -> None:
    with pytest.raises(ValueError, match="only one of cert and key"):
        Tls(ca=Path("ca.pem"), cert=Path("client.pem"))
    with pytest.raises(ValueError, match="only one of cert and key"):
        Tls(ca=Path("ca.pem"), key=Path("client.key"))


async def test_a_missing_or_malformed_tls_file_is_named(tmp_path: Path) -> None:
    client = AsyncEnvClient("pool.example.org:1", tls=Tls(ca=tmp_path / "none.pem"))
    with pytest.raises(FileNotFoundError, match=r"none\.pem"):
        await client.list_pools()
    (tmp_path / "no.pem").write_bytes(b"\x7fELF")
    client = AsyncEnvClient("pool.example.org:1", tls=Tls(ca=tmp_path / "no.pem"))
    with pytest.raises(ValueError, match=r"Tls\.ca .*no\.pem: has no PEM certificate; give the authority's"):
        await client.list_pools()
