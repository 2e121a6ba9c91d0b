"""The checks of `envd doctor` for QEMU, libvirt and KVM."""

import socket
import time
from pathlib import Path

import pytest

from envd.base.checks import HostCheck, Status
from envd.base.config import Config
from envd.base.config_sources import load
from envd.hypervisor.qemu import checks


def config_with(tmp_path: Path, **flags: object) -> Config:
    return load(flags={"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", **flags})


@pytest.mark.parametrize(
    ("version", "status"), [("7.1.0", Status.WARN), ("7.2.22", Status.OK), ("10.0.2", Status.OK), ("?", Status.OK)]
)
def test_an_old_qemu_is_a_warning(version: str, status: Status) -> None:
    found = HostCheck(name="qemu", status=Status.OK, detail=f"QEMU emulator version {version} (/usr/bin/qemu)")
    assert checks.check_qemu_version(found).status is status


async def test_missing_kvm_fails_only_if_kvm_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe_kvm(timeout_s: float) -> tuple[bool, str]:
        return False, f"no guest code ran within {timeout_s:g} s"

    monkeypatch.setattr(checks, "probe_kvm", probe_kvm)
    assert (await checks.check_kvm(config_with(tmp_path))).status is Status.WARN
    required = config_with(tmp_path, **{"hypervisor.accelerator": "kvm"})
    assert (await checks.check_kvm(required)).status is Status.FAIL


@pytest.mark.parametrize(
    ("detail", "fix"),
    [
        ("this user may not open /dev/kvm; join the group kvm", "sudo usermod -aG kvm $USER, and log in again"),
        ("/dev/kvm does not exist", "serve containers at native speed (--hypervisor oci:)"),
    ],
)
async def test_the_fix_fits_the_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detail: str, fix: str) -> None:
    async def probe_kvm(timeout_s: float) -> tuple[bool, str]:
        return False, detail

    monkeypatch.setattr(checks, "probe_kvm", probe_kvm)
    assert (await checks.check_kvm(config_with(tmp_path))).fix.startswith(fix)


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
    found = checks.check_host_name()
    assert found.status is status
    if status is Status.WARN:
        assert found.detail == "each start of a machine takes 10 s more: libvirt looks up the host name host-7"
        assert "/etc/hosts" in found.fix
