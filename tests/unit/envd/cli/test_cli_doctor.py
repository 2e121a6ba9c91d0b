"""The checks of `envd doctor`."""

import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cuaenv.client import Pool
from envd.base.checks import HostCheck, Status
from envd.base.config import Config
from envd.base.config_sources import load
from envd.cli import doctor


def config_with(tmp_path: Path, **flags: object) -> Config:
    return load(flags={"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", **flags})


def runner(monkeypatch: pytest.MonkeyPatch, checks: list[HostCheck]) -> tuple[typer.Typer, CliRunner]:
    async def examine(_: Config, **__: object) -> list[HostCheck]:
        return checks

    monkeypatch.setattr(doctor, "examine", examine)
    app = typer.Typer()
    app.command()(doctor.doctor)
    return app, CliRunner()


OK = HostCheck(name="python", status=Status.OK, detail="3.11.7")
WARN = HostCheck(name="kvm", status=Status.WARN, detail="no [guest] code runs", fix="use another host")
FAIL = HostCheck(name="qemu-img", status=Status.FAIL, detail="not found", fix="install it")


def test_json_is_one_object_with_every_check_and_the_worst_status(monkeypatch: pytest.MonkeyPatch) -> None:
    app, cli = runner(monkeypatch, [OK, FAIL, WARN])
    result = cli.invoke(app, ["--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["status"] == "fail"
    assert report["checks"][1] == {"name": "qemu-img", "status": "fail", "detail": "not found", "fix": "install it"}


def test_a_report_needs_no_name_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", getuser)
    app, cli = runner(monkeypatch, [replace(OK, detail=f"{socket.gethostname()} has /home/someone/state")])
    result = cli.invoke(app, ["--report"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["checks"][0]["detail"] == "HOST has PATH"


def test_warnings_alone_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    app, cli = runner(monkeypatch, [OK, WARN])
    result = cli.invoke(app, [])
    assert result.exit_code == 0
    assert "no [guest] code runs" in result.stdout
    assert "fix: use another host" in result.stdout


async def test_every_check_that_raises_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/root/x")

    for name in [name for name in vars(doctor) if name.startswith("check_")]:
        monkeypatch.setattr(doctor, name, refuse if name == "check_osworld" else fail)
    found = {check.name: check for check in await doctor.examine(config_with(tmp_path))}
    assert found.pop("python").status is Status.OK
    assert {check.status for check in found.values()} == {Status.FAIL}
    assert "UnicodeDecodeError" in found["images"].detail
    assert found["osworld"].detail == "the check failed: [Errno 13] Permission denied: '/root/x'"


# -- pools of a running daemon


POOL = Pool(
    name="desktop",
    image="ubuntu",
    accelerator="kvm",
    capacity=9,
    resident_count=4,
    idle_count=1,
    leased_count=3,
    dying_count=0,
    waiting_count=2,
    is_failing=False,
    problem="",
    host="127.0.0.1:50051",
)


@pytest.mark.parametrize(
    ("is_failing", "problem", "status", "health"),
    [
        (False, "", Status.OK, "healthy"),
        (False, "QEMU exited", Status.WARN, "degraded"),
        (True, "QEMU exited", Status.FAIL, "failing"),
    ],
)
def test_the_status_of_a_pool_is_its_health(is_failing: bool, problem: str, status: Status, health: str) -> None:
    check = doctor.check_pool(replace(POOL, is_failing=is_failing, problem=problem))
    assert (check.name, check.status) == ("pool desktop", status)
    assert check.detail.startswith(f"{health}, 3 of 4 machines leased, 2 requested")
    assert check.detail.endswith(problem)


async def test_a_missing_daemon_and_one_on_a_free_port_are_not_checked(tmp_path: Path) -> None:
    (check,) = await doctor.check_daemon(config_with(tmp_path), daemon_pid=None)
    assert (check.name, check.status) == ("daemon", Status.OK)
    assert "not running" in check.detail
    (check,) = await doctor.check_daemon(config_with(tmp_path, listen="127.0.0.1:0"), daemon_pid=42)
    assert check.status is Status.OK
    assert "not checked" in check.detail
