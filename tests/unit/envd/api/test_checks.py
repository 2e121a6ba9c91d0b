"""The checks of `envd doctor` for tokens, certificates and addresses."""

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from envd.api.checks import check_port, check_security
from envd.api.security.tokens import new_token
from envd.base.checks import Status
from envd.base.config import Config
from envd.base.config_sources import load
from envd.cli.certs import make_development_certs, write_certs


@pytest.fixture
def secured(tmp_path: Path) -> Config:
    certs = write_certs(tmp_path / "certs", make_development_certs([], now=datetime.now(UTC)))
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(new_token("a", "run", max_machines=None).line)
    settings = {"tls_cert": "server", "tls_key": "server_key", "client_ca": "ca"}
    files = {f"security.{key}": str(certs[name]) for key, name in settings.items()}
    return load(flags={**files, "security.tokens_file": str(tokens)})


def test_the_doctor_reads_tokens_and_certificates(secured: Config) -> None:
    check = check_security(secured, now=datetime.now(UTC))
    assert (check.status, check.detail) == (Status.OK, "1 tokens, TLS, client certificates, valid for 364 days")
    assert check_security(load(), now=datetime.now(UTC)).detail.startswith("neither TLS nor tokens")


@pytest.mark.parametrize(("days", "status"), [(300, Status.OK), (355, Status.WARN), (400, Status.FAIL)])
def test_the_doctor_warns_before_a_certificate_expires(secured: Config, days: int, status: Status) -> None:
    assert check_security(secured, now=datetime.now(UTC) + timedelta(days=days)).status is status


def test_the_doctor_reports_why_a_file_cannot_be_used(secured: Config) -> None:
    assert secured.security.tokens_file is not None
    secured.security.tokens_file.chmod(0o644)
    check = check_security(secured, now=datetime.now(UTC))
    assert check.status is Status.FAIL
    assert "has mode 0644" in check.detail


def test_the_doctor_accepts_a_socket_as_an_address() -> None:
    assert check_port("listen", "unix:/run/envd.sock", daemon_pid=None).status is Status.OK


def test_a_port_in_use_fails_unless_our_own_daemon_runs() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        failed = check_port("listen", listen, daemon_pid=None)
        assert failed.status is Status.FAIL
        assert failed.fix.startswith("stop what listens there")
        assert check_port("listen", listen, daemon_pid=42).detail.endswith("envd runs as process 42")
    assert check_port("listen", "127.0.0.1:0", daemon_pid=None).status is Status.OK
