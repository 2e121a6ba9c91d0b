"""Certificates, tokens and callers for the tests of access."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from envd.cli.certs import make_development_certs, write_certs
from tests.support.callers import Certs, Parties, Tokens, connected
from tests.support.server import serve_fake


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVD_TOKEN", raising=False)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Files of an authority, a server and a client."""
    return write_certs(tmp_path_factory.mktemp("certs"), make_development_certs([], now=datetime.now(UTC)))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Files of an authority that no server or client here trusts."""
    return write_certs(tmp_path_factory.mktemp("foreign"), make_development_certs([], now=datetime.now(UTC)))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens.create(tmp_path / "tokens")


@pytest.fixture
async def parties(tokens: Tokens) -> AsyncIterator[Parties]:
    """Four callers of one complete server with machines."""
    async with (
        serve_fake(size=2, capacity=6, security=tokens.security()) as server,
        connected(server.address, tokens.alice.secret) as alice,
        connected(server.address, tokens.bob.secret) as bob,
        connected(server.address, tokens.viewer.secret) as viewer,
        connected(server.address, tokens.admin.secret) as admin,
    ):
        yield Parties(server, alice, bob, viewer, admin)
