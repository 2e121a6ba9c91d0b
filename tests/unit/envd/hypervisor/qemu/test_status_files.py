"""Tests for the place of libvirt's status files."""

from pathlib import Path

import pytest

from envd.hypervisor.qemu.host import keep_status_in_memory


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_status_files_are_in_memory_where_the_next_daemon_finds_them(run: Path, memory: Path) -> None:
    keep_status_in_memory(run, memory=memory)
    (run / "status").touch()
    [directory] = memory.iterdir()
    assert [path.name for path in directory.iterdir()] == ["status"]
    assert directory.stat().st_mode & 0o777 == 0o700
    keep_status_in_memory(run, memory=memory)
    (run / "status").touch()
    keep_status_in_memory(run, memory=memory)
    assert (run / "status").exists()
    assert len(list(memory.iterdir())) == 1


def test_status_files_of_machines_stay_on_disk_until_those_have_ended(run: Path, memory: Path) -> None:
    (run / "qemu").mkdir(parents=True)
    status = run / "qemu" / "envd-1-m.xml"
    status.touch()
    keep_status_in_memory(run, memory=memory)
    assert status.exists()
    assert not run.is_symlink()
    status.unlink()
    keep_status_in_memory(run, memory=memory)
    assert run.is_symlink()


def test_a_link_whose_target_a_host_restart_removed_is_replaced(run: Path, memory: Path) -> None:
    keep_status_in_memory(run, memory=memory)
    run.readlink().rmdir()
    keep_status_in_memory(run, memory=memory)
    assert run.is_dir()


def test_a_target_that_another_made_is_not_used(run: Path, memory: Path, tmp_path: Path) -> None:
    keep_status_in_memory(run, memory=memory)
    taken = run.readlink()
    taken.rmdir()
    (tmp_path / "others").mkdir()
    taken.symlink_to(tmp_path / "others")
    keep_status_in_memory(run, memory=memory)
    assert run.readlink() != taken
    assert run.is_dir()
