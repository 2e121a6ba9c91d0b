"""`envd certs`, `envd tokens`, and the security check of `envd doctor`."""

import ipaddress
import json
import re
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from envd.api.security.access import Scope
from envd.api.security.tokens import parse_tokens
from envd.base.config import Config
from envd.base.config_sources import load
from envd.cli import doctor
from envd.cli.app import app
from envd.cli.certificates import make_development_certs
from envd.cli.doctor import Status

FILES = {"ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key"}


def run(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_certs_creates_certificates_with_private_keys_and_prints_the_settings(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    output = run("certs", str(directory), "--host", "pool.example.org", "--host", "192.0.2.7")
    assert {path.name for path in directory.iterdir()} == FILES
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {path.name for path in directory.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600} == {
        "ca.key",
        "server.key",
        "client.key",
    }
    assert f'tls_key = "{directory}/server.key"' in output
    assert 'Tls(ca=Path("ca.pem")' in output
    assert "PRIVATE KEY" not in output
    names = x509.load_pem_x509_certificate((directory / "server.pem").read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["pool.example.org", "localhost"]
    assert names.value.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(address) for address in ("192.0.2.7", "127.0.0.1", "::1")
    ]


def test_the_printed_json_settings_load(tmp_path: Path) -> None:
    output = json.loads(run("certs", str(tmp_path), "--json"))
    assert {Path(path).name for path in output["files"].values()} == FILES
    config = load(flags={"listen": "0.0.0.0:1", **output["settings"]})
    assert config.security.client_ca == tmp_path / "ca.pem"
    assert datetime.fromisoformat(output["expire_time"]) > datetime.now(UTC) + timedelta(days=300)


@pytest.mark.parametrize("existing", ["server.key", "ca.pem"])
def test_no_file_is_ever_overwritten(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("mine")
    message = run("certs", str(tmp_path), status=2)
    assert "already exists, and is never overwritten" in message
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"


def test_a_file_in_place_of_the_directory_is_described(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    assert "cannot write certificates: not a directory; use another directory" in run(
        "certs", str(tmp_path / "c"), status=2
    )


@pytest.mark.parametrize("host", ["", "a b", "x/y", "-", "a..b", "ä.example"])
def test_an_invalid_host_name_is_refused(tmp_path: Path, host: str) -> None:
    assert "neither a DNS name nor an IP address" in run("certs", str(tmp_path / "c"), "--host", host, status=2)
    assert not (tmp_path / "c").exists()


def test_each_certificate_has_one_purpose() -> None:
    certs = make_development_certs(["a.example"], now=datetime.now(UTC))
    server, client = (x509.load_pem_x509_certificate(issued.cert_pem) for issued in (certs.server, certs.client))
    purposes = {
        name: [purpose._name for purpose in cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value]
        for name, cert in (("server", server), ("client", client))
    }
    assert purposes == {"server": ["serverAuth"], "client": ["clientAuth"]}
    for cert in (server, client):
        assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        cert.verify_directly_issued_by(x509.load_pem_x509_certificate(certs.ca.cert_pem))
    ssl.create_default_context(cadata=certs.ca.cert_pem.decode())
    assert b"PRIVATE" not in repr(certs).encode()


def test_a_new_token_is_printed_once_with_its_line() -> None:
    output = run("tokens", "new", "trainer-a", "--scope", "admin")
    [secret] = re.findall(r"^envd_\S+$", output, re.MULTILINE)
    [line] = re.findall(r"^trainer-a admin sha256:\S+$", output, re.MULTILINE)
    caller = parse_tokens(line).find(secret)
    assert caller is not None
    assert (caller.name, caller.scope) == ("trainer-a", Scope.ADMIN)


def test_the_default_scope_of_a_token_is_run() -> None:
    output = json.loads(run("tokens", "new", "a", "--json"))
    assert (output["name"], output["scope"]) == ("a", "run")
    assert parse_tokens(output["line"]).find(output["token"]) is not None


def test_an_unknown_scope_is_refused() -> None:
    assert "scope 'root': expected one of read, run, admin" in run("tokens", "new", "a", "--scope", "root", status=2)


# -- doctor -----------------------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> Config:
    settings = json.loads(run("certs", str(tmp_path / "certs"), "--json"))["settings"]
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(json.loads(run("tokens", "new", "a", "--json"))["line"])
    return load(flags={**settings, "security.tokens_file": str(tokens)})


def test_the_doctor_reads_tokens_and_certificates(secured: Config) -> None:
    check = doctor.check_security(secured, now=datetime.now(UTC))
    assert (check.status, check.detail) == (Status.OK, "1 tokens, TLS, client certificates, valid for 364 days")
    assert doctor.check_security(load(), now=datetime.now(UTC)).detail.startswith("neither TLS nor tokens")


@pytest.mark.parametrize(("days", "status"), [(300, Status.OK), (355, Status.WARN), (400, Status.FAIL)])
def test_the_doctor_warns_before_a_certificate_expires(secured: Config, days: int, status: Status) -> None:
    assert doctor.check_security(secured, now=datetime.now(UTC) + timedelta(days=days)).status is status


def test_the_doctor_reports_why_a_file_cannot_be_used(secured: Config) -> None:
    assert secured.security.tokens_file is not None
    secured.security.tokens_file.chmod(0o644)
    check = doctor.check_security(secured, now=datetime.now(UTC))
    assert check.status is Status.FAIL
    assert "has mode 0644" in check.detail


def test_the_doctor_accepts_a_socket_as_an_address() -> None:
    assert doctor.check_port("listen", "unix:/run/envd.sock", daemon_pid=None).status is Status.OK
