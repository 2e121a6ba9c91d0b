"""`envd certs` and `envd tokens`."""

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
from envd.base.config_sources import load
from envd.cli.app import app
from envd.cli.certs import make_development_certs

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


def test_the_authority_signs_both_certificates_and_that_of_the_client_names_no_host() -> None:
    certs = make_development_certs(["a.example"], now=datetime.now(UTC))
    authority = x509.load_pem_x509_certificate(certs["ca"])
    server, client = (x509.load_pem_x509_certificate(certs[name]) for name in ("server", "client"))
    for cert in (server, client):
        assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        cert.verify_directly_issued_by(authority)
    names = client.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["client.invalid"]
    ssl.create_default_context(cadata=certs["ca"].decode())


def test_a_new_token_is_printed_once_with_its_line() -> None:
    output = run("tokens", "new", "trainer-a", "--scope", "admin")
    [secret] = re.findall(r"^envd_\S+$", output, re.MULTILINE)
    [line] = re.findall(r"^trainer-a admin sha256:\S+$", output, re.MULTILINE)
    caller = parse_tokens(line).find(secret)
    assert caller is not None
    assert (caller.name, caller.scope) == ("trainer-a", Scope.ADMIN)


def test_the_default_scope_of_a_token_is_run_and_an_unknown_one_is_refused() -> None:
    output = json.loads(run("tokens", "new", "a", "--json"))
    assert (output["name"], output["scope"]) == ("a", "run")
    assert parse_tokens(output["line"]).find(output["token"]) is not None
    assert "scope 'root': expected one of read, run, admin" in run("tokens", "new", "a", "--scope", "root", status=2)
