"""`envd doctor` and the pools of a daemon that runs."""

import json
import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Tls
from envd.base.checks import HostCheck, Status
from envd.base.config import Config, SecurityConfig
from envd.base.config_sources import load
from envd.cli import doctor
from envd.cli.certs import make_development_certs, write_certs
from tests.support.callers import Tokens
from tests.support.clock import until
from tests.support.command import run_envd
from tests.support.faulty import Faults
from tests.support.server import serve_fake


def config_with(tmp_path: Path, listen: str) -> Config:
    return load(flags={"state_dir": tmp_path, "listen": listen})


async def test_a_daemon_that_does_not_respond_is_a_warning(tmp_path: Path) -> None:
    with socket.socket() as silent:  # it accepts connections and never responds
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        listen = f"127.0.0.1:{silent.getsockname()[1]}"
        config, soon = config_with(tmp_path, listen), timedelta(seconds=0.2)
        (check,) = await doctor.check_daemon(config, daemon_pid=42, timeout=soon)
    assert check.status is Status.WARN
    assert f"process 42 on {listen} does not respond" in check.detail


async def test_the_pools_of_a_running_daemon_are_checked(tmp_path: Path) -> None:
    async with serve_fake(size=1) as server:
        await until(lambda: server.pool.statistics().idle_count > 0)
        checks = await doctor.check_daemon(config_with(tmp_path, server.address), daemon_pid=42)
    assert [(check.name, check.status) for check in checks] == [("daemon", Status.OK), ("pool fake", Status.OK)]
    assert checks[1].detail == "healthy, 0 of 2 machines leased, 0 requested"


async def test_a_failing_pool_of_a_running_daemon_fails_with_its_problem(tmp_path: Path) -> None:
    async with serve_fake(size=1, faults=Faults(create_error="no memory left"), failing_after=1) as server:
        await until(lambda: not server.pool.statistics().healthy)
        _, check = await doctor.check_daemon(config_with(tmp_path, server.address), daemon_pid=42)
    assert check.status is Status.FAIL
    assert "failing, 0 of 2 machines leased, 0 requested; " in check.detail
    assert "no memory left" in check.detail


def secured(certs: dict[str, Path], **more: Any) -> SecurityConfig:
    return SecurityConfig(tls_cert=certs["server"], tls_key=certs["server_key"], **more)


async def daemon_checks(tmp_path: Path, security: SecurityConfig, *, tls: Tls | None = None) -> list[HostCheck]:
    async with serve_fake(size=1, security=security) as server:
        config = config_with(tmp_path, server.address).model_copy(update={"security": security})
        await until(lambda: server.pool.statistics().idle_count > 0)
        return await doctor.check_daemon(config, daemon_pid=42, tls=tls)


@pytest.mark.parametrize("hosts", [[], ["*.envd.example"]])
async def test_the_pools_of_a_daemon_with_tls_and_tokens_are_checked(
    tmp_path: Path, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = write_certs(tmp_path / "certs", make_development_certs(hosts, now=datetime.now(UTC)))
    tokens = Tokens.create(tmp_path / "tokens")
    monkeypatch.setenv("ENVD_TOKEN", tokens.viewer.secret)
    both = secured(certs, tokens_file=tokens.path)
    for security in (secured(certs), tokens.security(), both):
        checks = await daemon_checks(tmp_path, security)
        assert [(check.name, check.status) for check in checks] == [("daemon", Status.OK), ("pool fake", Status.OK)]
    monkeypatch.delenv("ENVD_TOKEN")
    (check,) = await daemon_checks(tmp_path, both)
    assert check.status is Status.OK
    assert "responds, but its pools were not checked: " in check.detail
    assert check.detail.endswith("set ENVD_TOKEN to one of its tokens")


async def test_the_pools_of_a_daemon_that_requires_client_certificates_are_checked_with_one(tmp_path: Path) -> None:
    certs = write_certs(tmp_path / "certs", make_development_certs([], now=datetime.now(UTC)))
    security = secured(certs, client_ca=certs["ca"])
    (check,) = await daemon_checks(tmp_path, security)
    assert check.status is Status.OK
    assert check.detail.endswith("give --tls-cert and --tls-key to check its pools")
    tls = Tls(ca=certs["server"], cert=certs["client"], key=certs["client_key"])
    assert [check.name for check in await daemon_checks(tmp_path, security, tls=tls)] == ["daemon", "pool fake"]


async def test_a_token_is_not_sent_to_a_daemon_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVD_TOKEN", "a secret of another daemon")  # malformed: the client would refuse it
    assert [check.status for check in await daemon_checks(tmp_path, SecurityConfig())] == [Status.OK, Status.OK]


def test_a_report_names_neither_its_host_nor_its_directories(tmp_path: Path) -> None:
    state_dir = tmp_path / "secret-project"
    done = run_envd(
        "doctor", "--report", "--hypervisor", "fake", "--state-dir", str(state_dir), "--listen", "127.0.0.1:1"
    )
    report = json.loads(done.out)
    assert {check["name"] for check in report["checks"]} > {"python", "state_dir", "listen"}
    assert report["packages"]["grpcio"]
    private = ("secret-project", re.escape(socket.gethostname()), "127.0.0.1")
    assert [word for word in private if re.search(rf"\b{word}\b", done.out)] == []
