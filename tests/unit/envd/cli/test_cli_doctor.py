"""The checks of `envd doctor`."""

import getpass
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cuaenv.client import Pool
from envd.base.config import Config
from envd.base.config_sources import load
from envd.cli import doctor
from envd.cli.doctor import Check, Status
from envd.hypervisor.machine import Firmware, GuestOs, Hardware
from envd.hypervisor.qemu.accelerator import KvmProbe
from envd.hypervisor.qemu.user import Account, QemuUser
from envd.images.catalogue import Image, ImageCatalogue, ImportedDisk

GIB = 1 << 30


def config_with(tmp_path: Path, **flags: object) -> Config:
    return load(flags={"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", **flags})


def runner(monkeypatch: pytest.MonkeyPatch, checks: list[Check]) -> tuple[typer.Typer, CliRunner]:
    async def examine(_: Config, **__: object) -> list[Check]:
        return checks

    monkeypatch.setattr(doctor, "examine", examine)
    app = typer.Typer()
    app.command()(doctor.doctor)
    return app, CliRunner()


OK = Check(name="python", status=Status.OK, detail="3.11.7")
WARN = Check(name="kvm", status=Status.WARN, detail="no [guest] code runs", fix="use another host")
FAIL = Check(name="qemu-img", status=Status.FAIL, detail="not found", fix="install it")


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


def missing_tool(*, needed: bool) -> Check:
    return doctor.check_tool("no-such-tool", package="tools", purpose="for x", version_of=str, needed=needed)


def test_a_missing_required_tool_fails_and_names_its_package() -> None:
    assert missing_tool(needed=True).status is Status.FAIL
    assert missing_tool(needed=False).status is Status.WARN


@pytest.mark.parametrize(("user_id", "sudo"), [(0, ""), (1000, "sudo ")])
def test_a_fix_that_needs_root_says_sudo_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_id: int, sudo: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user_id)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert missing_tool(needed=True).fix == f"`make deps`, or `{sudo}apt-get install tools`"
    build = doctor.check_images(config_with(tmp_path), now=datetime.now(UTC)).fix
    assert build == f"`{sudo}{sys.prefix}/bin/envd image build desktop`"


def test_a_tool_that_does_not_run_fails() -> None:
    def version_of(path: str) -> str:
        raise subprocess.CalledProcessError(127, path)

    check = doctor.check_tool("sh", package="dash", purpose="", version_of=version_of)
    assert check.status is Status.FAIL
    assert "does not run" in check.detail


@pytest.mark.parametrize(
    ("version", "status"), [("7.1.0", Status.WARN), ("7.2.22", Status.OK), ("10.0.2", Status.OK), ("?", Status.OK)]
)
def test_an_old_qemu_is_a_warning(version: str, status: Status) -> None:
    found = Check(name="qemu", status=Status.OK, detail=f"QEMU emulator version {version} (/usr/bin/qemu)")
    assert doctor.check_qemu_version(found).status is status


@pytest.mark.parametrize(
    ("free_bytes", "writable", "status"),
    [(20 * GIB, True, Status.OK), (4 * GIB, True, Status.WARN), (0, True, Status.FAIL), (20 * GIB, False, Status.FAIL)],
)
def test_a_directory_needs_free_space_and_write_permission(free_bytes: int, writable: bool, status: Status) -> None:
    assert doctor.check_disk("state_dir", Path("/x"), free_bytes=free_bytes, writable=writable).status is status


@pytest.mark.parametrize(("count", "status"), [(128, Status.WARN), (8192, Status.OK)])
def test_few_inotify_instances_limit_the_desktops_in_containers(count: int, status: Status) -> None:
    check = doctor.check_inotify(count)
    assert check.status is status
    assert f"about {count // 6} desktops" in check.detail
    assert ("sysctl" in check.fix) == (status is Status.WARN)


def test_less_free_disk_than_the_reserve_is_a_failure() -> None:
    check = doctor.check_disk("state_dir", Path("/x"), free_bytes=9 << 30, writable=True, reserve_bytes=10 << 30)
    assert check.status is doctor.Status.FAIL


def status_of_memory(tmp_path: Path, available_bytes: int, *, daemon_pid: int | None = None, **flags: Any) -> Status:
    config = config_with(
        tmp_path, pools={"desktop": {"size": 16, "memory_mib": 4096, "expected_memory_mib": 700}}, **flags
    )
    return doctor.check_memory(config, available_bytes=available_bytes, daemon_pid=daemon_pid).status


def test_memory_is_enough_if_the_pools_would_start_all_machines(tmp_path: Path) -> None:
    # 4 GiB of a template, 16 forks of 700 MiB, and 1 GiB that stays free.
    enough_bytes = (4096 + 128 + 16 * 700 + 1024) << 20
    assert status_of_memory(tmp_path, enough_bytes) is Status.OK
    assert status_of_memory(tmp_path, enough_bytes - 1) is Status.WARN


def test_the_memory_of_a_running_daemon_is_not_counted_twice(tmp_path: Path) -> None:
    assert status_of_memory(tmp_path, GIB, daemon_pid=42) is Status.OK


def test_drawn_desktops_need_no_memory_of_guests(tmp_path: Path) -> None:
    fake: dict[str, Any] = {"hypervisor.uri": "fake"}
    assert status_of_memory(tmp_path, GIB, **fake) is Status.OK


async def test_every_check_that_fails_with_an_exception_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_pool_without_its_image_fails_unless_the_hypervisor_is_fake(tmp_path: Path) -> None:
    pools = {"pools": {"desktop": {"size": 1}}}
    assert doctor.check_images(config_with(tmp_path), now=datetime.now(UTC)).status is Status.WARN
    assert "desktop" in doctor.check_images(config_with(tmp_path, **pools), now=datetime.now(UTC)).detail
    assert doctor.check_images(config_with(tmp_path, **pools), now=datetime.now(UTC)).status is Status.FAIL
    fake = config_with(tmp_path, **pools, **{"hypervisor.uri": "fake"})
    assert doctor.check_images(fake, now=datetime.now(UTC)).status is Status.WARN


@pytest.mark.parametrize(
    ("now", "status", "detail"),
    [
        (datetime(2026, 3, 10, tzinfo=UTC), Status.OK, "win11"),
        (datetime(2026, 3, 20, tzinfo=UTC), Status.WARN, "of Windows in image win11 ends in 12 days (2026-04-01)"),
        (datetime(2026, 4, 2, tzinfo=UTC), Status.WARN, "image win11 has ended (2026-04-01)"),
    ],
)
def test_an_evaluation_is_reported_before_it_ends(tmp_path: Path, now: datetime, status: Status, detail: str) -> None:
    config = config_with(tmp_path)
    catalogue = ImageCatalogue(config.cache_dir)
    for name, expires in (("win11", "2026-04-01T12:00:00+00:00"), ("desktop", "")):
        with catalogue.staging(name) as directory:
            (directory / "disk.qcow2").touch()
            image = Image(name=name, digest="0" * 64, disk="disk.qcow2", disk_sha256="", expires=expires)
            catalogue.publish(directory, image)
    check = doctor.check_images(config, now=now)
    assert check.status is status
    assert detail in check.detail
    assert ("--rebuild" in check.fix) is (status is Status.WARN)


def test_missing_firmware_and_swtpm_fail_only_if_an_image_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tmp_path)
    assert doctor.check_firmware(config).status is doctor.check_tpm(config).status is Status.OK
    monkeypatch.setattr(doctor, "find_firmware", lambda: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert doctor.check_firmware(config).status is doctor.check_tpm(config).status is Status.WARN
    disk = tmp_path / "disk.qcow2"
    disk.write_bytes(b"QFI\xfb")
    ImageCatalogue(config.cache_dir).import_file(
        "win11", ImportedDisk(file=disk, os_family=GuestOs.WINDOWS, firmware=Firmware.UEFI, hardware=Hardware.WINDOWS)
    )
    firmware, tpm = doctor.check_firmware(config), doctor.check_tpm(config)
    assert (firmware.status, firmware.detail) == (Status.FAIL, "no OVMF, but images boot by UEFI: win11")
    assert (tpm.status, tpm.detail) == (Status.FAIL, "not found; the machines of win11 have a TPM")
    assert "apt-get install ovmf" in firmware.fix
    assert "apt-get install swtpm" in tpm.fix
    other = config_with(tmp_path, pools={"desktop": {"size": 1}})
    assert doctor.check_tpm(other).status is Status.WARN


def test_a_port_in_use_fails_unless_our_own_daemon_runs() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert doctor.check_port("listen", listen, daemon_pid=None).status is Status.FAIL
        assert doctor.check_port("listen", listen, daemon_pid=42).detail.endswith("envd runs as process 42")
    assert doctor.check_port("listen", "127.0.0.1:0", daemon_pid=None).status is Status.OK


async def test_missing_kvm_fails_only_if_kvm_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe_kvm(timeout_s: float) -> KvmProbe:
        return KvmProbe(usable=False, detail=f"no guest code ran within {timeout_s:g} s")

    monkeypatch.setattr(doctor, "probe_kvm", probe_kvm)
    assert (await doctor.check_kvm(config_with(tmp_path))).status is Status.WARN
    required = config_with(tmp_path, **{"hypervisor.accelerator": "kvm"})
    assert (await doctor.check_kvm(required)).status is Status.FAIL


@pytest.mark.parametrize(
    ("detail", "fix"),
    [
        ("this user may not open /dev/kvm; join the group kvm", "sudo usermod -aG kvm $USER, and log in again"),
        ("/dev/kvm does not exist", "use a host with working virtualisation; only speed is affected"),
    ],
)
async def test_the_fix_for_kvm_fits_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detail: str, fix: str
) -> None:
    async def probe_kvm(timeout_s: float) -> KvmProbe:
        return KvmProbe(usable=False, detail=detail)

    monkeypatch.setattr(doctor, "probe_kvm", probe_kvm)
    assert (await doctor.check_kvm(config_with(tmp_path))).fix == fix


def test_the_fix_for_a_closed_kvm_device_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = QemuUser(account=None, why="libvirt-qemu cannot read and write /dev/kvm")
    monkeypatch.setattr(doctor, "choose_qemu_user", lambda wanted, needs: chosen)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert doctor.check_qemu_user(config_with(tmp_path)).fix == "chgrp kvm /dev/kvm; chmod 660 /dev/kvm"


# -- pools of a running daemon


POOL = Pool(
    name="desktop",
    image="ubuntu",
    accelerator="kvm",
    capacity=4,
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


async def test_a_missing_daemon_is_ok(tmp_path: Path) -> None:
    (check,) = await doctor.check_daemon(config_with(tmp_path), daemon_pid=None)
    assert (check.name, check.status) == ("daemon", Status.OK)
    assert "not running" in check.detail


async def test_the_pools_of_a_daemon_on_a_free_port_are_not_checked(tmp_path: Path) -> None:
    (check,) = await doctor.check_daemon(config_with(tmp_path, listen="127.0.0.1:0"), daemon_pid=42)
    assert check.status is Status.OK
    assert "not checked" in check.detail


@pytest.mark.parametrize(
    ("chosen", "status", "detail"),
    [
        (
            QemuUser(account=None, why="qemu cannot get through /root"),
            Status.WARN,
            "root: qemu cannot get through /root",
        ),
        (
            QemuUser(account=Account(name="qemu", user_id=7, group_id=7, group_ids=frozenset()), why="it can"),
            Status.OK,
            "QEMU runs as qemu: it can",
        ),
    ],
)
def test_the_user_of_qemu_is_shown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: QemuUser, status: Status, detail: str
) -> None:
    monkeypatch.setattr(doctor, "choose_qemu_user", lambda wanted, needs: chosen)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    check = doctor.check_qemu_user(config_with(tmp_path))
    assert check.status is status
    assert detail in check.detail
    assert bool(check.fix) == (status is Status.WARN)


def test_a_user_that_cannot_run_qemu_fails_with_its_name(tmp_path: Path) -> None:
    check = doctor.check_qemu_user(config_with(tmp_path, **{"hypervisor.qemu_user": "no-such-user"}))
    assert check.status is Status.FAIL
    assert "no-such-user" in check.detail
    assert doctor.check_qemu_user(config_with(tmp_path, **{"hypervisor.uri": "fake"})).status is Status.OK


@pytest.mark.parametrize(
    ("name", "lookup_s", "status"),
    [("host-7", 10.1, Status.WARN), ("host-7", 0.01, Status.OK), ("host-7.example", 10.1, Status.OK)],
)
def test_a_slow_lookup_of_the_hosts_name_is_a_warning(
    name: str, lookup_s: float, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def look_up(*_: object) -> None:
        nonlocal now_s
        now_s += lookup_s
        raise OSError("temporary failure in name resolution")

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    found = doctor.check_host_name()
    assert found.status is status
    if status is Status.WARN:
        assert found.detail == "each start of a machine takes 10 s more: libvirt looks up the host name host-7"
        assert "/etc/hosts" in found.fix
