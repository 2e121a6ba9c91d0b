"""The configuration of a container, its users' ids, and whose fault its end is. No container runs."""

import os
import signal
from pathlib import Path, PurePosixPath

import pytest

from envd.base.checks import Status
from envd.base.errors import ConfigError, HypervisorError
from envd.base.losses import LossOwner
from envd.base.sandbox.cgroup import group_below
from envd.hypervisor.machine import DiskImage, Firmware, GuestOs, MachineSpec
from envd.hypervisor.oci import ids, images
from envd.hypervisor.oci.bundle import container_config
from envd.hypervisor.oci.checks import check_inotify, check_limits
from envd.hypervisor.oci.control_groups import own_groups
from envd.hypervisor.oci.hypervisor import _check_path_length
from envd.hypervisor.oci.images import find_debugfs, obstacle
from envd.hypervisor.oci.machine import _loss_by_exit

IMAGE = DiskImage(name="desktop", digest="d", disk=Path("/d"), packages="tigervnc-standalone-server 1.12\nxterm 1\n")


def config(*, has_groups: bool = True, has_sudo: bool = False) -> dict[str, object]:
    groups = PurePosixPath("/groups/m1")
    spec = MachineSpec(
        machine_id="m1", image=IMAGE, memory_mib=1024, screen_width_px=1280, screen_height_px=800, keyboard_layout="de"
    )
    made = container_config(
        spec,
        envd_directory=PurePosixPath("/mnt/machines/m1/envd"),
        max_open_files=4096,
        has_sudo=has_sudo,
        groups=groups / "guest" if has_groups else None,
        display_group=groups / "display" if has_groups else None,
    )
    return dict(made)


def test_a_container_shares_no_namespace_with_the_host() -> None:
    linux = config()["linux"]
    assert isinstance(linux, dict)
    assert {each["type"] for each in linux["namespaces"]} == {"pid", "network", "ipc", "uts", "mount", "cgroup"}


def test_only_the_machines_own_directories_are_bound_from_the_host() -> None:
    mounts = config()["mounts"]
    assert isinstance(mounts, list)
    bound = {each["destination"]: each["source"] for each in mounts if each["type"] == "bind"}
    assert bound == {
        "/envd": "/mnt/machines/m1/envd",
        "/sys/fs/cgroup": "/groups/m1/guest",
        "/envd/display": "/groups/m1/display",
    }


def test_without_control_groups_nothing_of_them_is_bound() -> None:
    mounts = config(has_groups=False)["mounts"]
    assert isinstance(mounts, list)
    assert [each["destination"] for each in mounts if each["type"] == "bind"] == ["/envd"]
    assert mounts[-1]["destination"] == "/sys/fs/cgroup", "the image's scripts need the directory"


def test_no_capability_reaches_the_kernel_and_the_dangerous_calls_are_refused() -> None:
    process, linux = config()["process"], config()["linux"]
    assert isinstance(process, dict)
    assert isinstance(linux, dict)
    assert process["noNewPrivileges"] is True
    for kind in ("bounding", "effective", "permitted"):
        allowed = process["capabilities"][kind]
        assert not {"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_MODULE", "CAP_MKNOD"} & set(allowed)
    refused = {name for rule in linux["seccomp"]["syscalls"] for name in rule["names"]}
    named = "mount umount2 keyctl bpf userfaultfd perf_event_open io_uring_setup init_module kexec_load setns clone3"
    assert {*named.split(), "unshare", "pivot_root", "open_by_handle_at"} <= refused


def test_programs_gain_rights_only_in_an_image_with_sudo() -> None:
    for has_sudo in (False, True):
        process = config(has_sudo=has_sudo)["process"]
        assert isinstance(process, dict)
        assert process["noNewPrivileges"] is not has_sudo
        assert ("--no-new-privs" in process["args"]) is not has_sudo


@pytest.mark.parametrize(
    ("status", "is_out_of_memory", "owner", "cause"),
    [
        (0, False, LossOwner.GUEST, "POWER_OFF"),
        (1, False, LossOwner.GUEST, "POWER_OFF"),
        (-signal.SIGSEGV, False, LossOwner.GUEST, "PANIC"),
        (-signal.SIGKILL, True, LossOwner.GUEST, "PANIC"),
        (-signal.SIGKILL, False, LossOwner.HOST, ""),
    ],
)
def test_who_ended_a_container_follows_from_how_its_first_process_ended(
    status: int, is_out_of_memory: bool, owner: LossOwner, cause: str
) -> None:
    loss = _loss_by_exit(status, is_out_of_memory=is_out_of_memory)
    assert (loss.owner, loss.cause) == (owner, cause)


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (IMAGE, ""),
        (DiskImage(name="wine", digest="d", disk=Path("/d"), os=GuestOs.WINDOWS), "image wine: its guests run windows"),
        (
            DiskImage(name="mine", digest="d", disk=Path("/d"), firmware=Firmware.BIOS),
            "image mine: an imported disk cannot run as a container",
        ),
        (DiskImage(name="old", digest="d", disk=Path("/d"), packages="xterm 1\n"), "run `envd image build old`"),
    ],
)
def test_images_that_containers_cannot_run_are_named_with_the_remedy(image: DiskImage, problem: str) -> None:
    found = obstacle(image)
    assert problem in found
    assert bool(found) == bool(problem)


def test_groups_are_found_and_not_repeated_in_a_path() -> None:
    assert group_below("/sys/fs/cgroup", "/", "/a/b") == "/sys/fs/cgroup/a/b"
    assert group_below("/sys/fs/cgroup/memory", "/docker/1", "/docker/1/envd") == "/sys/fs/cgroup/memory/envd"
    for directory in own_groups().values():
        assert (directory / "cgroup.procs").exists()


@pytest.mark.parametrize(("count", "status"), [(128, Status.WARN), (8192, Status.OK)])
def test_few_inotify_instances_limit_the_desktops_in_containers(count: int, status: Status) -> None:
    check = check_inotify(count)
    assert check.status is status
    assert f"about {count // 6} desktops" in check.detail
    assert ("sysctl" in check.fix) == (status is Status.WARN)


@pytest.mark.parametrize(
    ("groups", "status"),
    [
        ("control groups", Status.OK),
        ("control groups, without limits of memory", Status.WARN),
        ("control groups cannot be created: Permission denied", Status.WARN),
    ],
)
def test_missing_limits_are_a_warning(groups: str, status: Status) -> None:
    check = check_limits(f"oci: containers of root by runc, {groups}")
    assert check.status is status
    assert ("Delegate=yes" in check.fix) == (status is Status.WARN)


def test_a_user_without_subordinate_ids_gets_the_command_that_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_001)
    with pytest.raises(ConfigError, match="usermod --add-subuids 100000-165535"):
        ids.own_ids()


def test_subordinate_ids_are_read_by_name_and_number_and_must_suffice(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("other:100000:65536\n4000001:200000:1000\n4000001:300000:65536\n# comment\n")
    assert ids._subordinate(str(file), 4_000_001) == 300_000
    assert ids._subordinate(str(file), 4_000_002) is None
    assert ids._subordinate(str(tmp_path / "missing"), 4_000_001) is None


@pytest.mark.parametrize(
    ("available", "first", "count"),
    [(4_294_967_295, 2_000_000_000, 65_536), (65_536, 10_000, 55_536), (131_072, 10_000, 65_536)],
)
def test_root_of_a_pods_namespace_uses_upper_ids(
    monkeypatch: pytest.MonkeyPatch, available: int, first: int, count: int
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(ids, "_subordinate", lambda *_: None)
    monkeypatch.setattr(ids, "_available", lambda _: available)
    own = ids.own_ids()
    assert own.lines(groups=False) == own.lines(groups=True) == [(0, first, 1), (1, first + 1, count - 1)]


def test_a_namespace_has_ids_up_to_the_first_gap_and_must_have_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "uid_map"
    file.write_text("    1000     500000      64536\n       0     400000       1000\n  90000 1 5\n")
    assert ids._available(str(file)) == 65_536
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(ids, "_available", lambda _: 1)
    with pytest.raises(ConfigError, match="the user namespace has 1 ids, but containers need 12000"):
        ids.own_ids()


def test_debugfs_is_found_outside_an_ordinary_users_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbin" / "debugfs"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(images, "_SYSTEM_PROGRAMS", str(program.parent))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_debugfs() == str(program)


def test_a_missing_debugfs_is_reported_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_SYSTEM_PROGRAMS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HypervisorError, match="install the package e2fsprogs"):
        find_debugfs()


def test_a_state_directory_is_too_long_only_for_the_sockets_of_its_pools() -> None:
    directory = Path("/" + "d" * 60, "containers")
    _check_path_length(directory, ["desktop"])
    with pytest.raises(ConfigError, match="would have paths of up to 113 bytes, but the system's limit is 107"):
        _check_path_length(directory, ["desktop", "a-pool-of-15-ch"])
    with pytest.raises(ConfigError, match="choose a shorter --state-dir"):
        _check_path_length(directory, [])
