"""Templates on disk: lookup, verification, removal of damaged ones, size limit."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from envd.base.errors import TemplateCorrupt
from envd.hypervisor.machine import Accelerator, DiskImage, MachineSpec
from envd.hypervisor.qemu.capture import Freezer
from envd.hypervisor.qemu.monitor import parse_memory_blocks
from envd.hypervisor.qemu.snapshots.files import QemuFiles, SnapshotManifest, digest_file, read_manifest
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore
from tests.support.qemu_templates import add_template

LIMIT = 1 << 30


def store_at(directory: Path, *, limit_bytes: int = LIMIT) -> QemuTemplateStore:
    return QemuTemplateStore(directory / "templates", limit_bytes=limit_bytes)


@pytest.fixture
def store(tmp_path: Path) -> QemuTemplateStore:
    return store_at(tmp_path)


def add_with_drives(store: QemuTemplateStore, key: str) -> SnapshotManifest:
    """Store a template with UEFI variables and an additional disk."""
    plain = add_template(store, key)
    files = QemuFiles(directory=store.directory / key)
    for path in (files.firmware_vars, *files.disks(2)[1:], *files.seeds(2)[1:]):
        path.write_bytes(path.name.encode())
    more = {path.name: digest_file(path) for path in (*files.disks(2)[1:], files.firmware_vars)}
    manifest = plain.model_copy(update={"more_digests": more})
    store.complete(files, manifest)
    return manifest


@pytest.mark.parametrize("name", ["vars.fd", "disk1.qcow2", "overlay1.qcow2"])
def test_uefi_variables_and_additional_disks_are_verified(name: str, store: QemuTemplateStore) -> None:
    manifest = add_with_drives(store, "k1")
    assert manifest.disk_digest in manifest.disk_digests
    assert len(manifest.disk_digests) == 2
    assert manifest.digest != manifest.model_copy(update={"more_digests": {}}).digest
    assert store.find("k1") is not None
    path = store.directory / "k1" / name
    if name.startswith("overlay"):
        path.unlink()
    else:
        path.write_bytes(b"other")
    with pytest.raises(TemplateCorrupt, match=name):
        store.find("k1")
    assert store.find("k1") is None


def keys(store: QemuTemplateStore) -> list[str]:
    return [template.key for template in store.all()]


def test_a_stored_template_is_found_by_its_key_and_replaced_by_a_new_one(
    tmp_path: Path, store: QemuTemplateStore
) -> None:
    manifest = add_template(store_at(tmp_path), "k1")
    found = store_at(tmp_path).find("k1")
    assert found is not None
    assert found == manifest
    assert found.digest == manifest.digest
    assert store_at(tmp_path).find("k2") is None
    first = add_template(store, "k1")
    second = add_template(store, "k1")
    assert first.memory_digest != second.memory_digest
    found = store.find("k1")
    assert found is not None
    assert found == second == read_manifest(store.files_of(found))


def test_an_incomplete_template_is_not_found_and_is_swept(store: QemuTemplateStore) -> None:
    add_template(store, "k1")
    files = store.begin("half")
    files.disk.write_bytes(b"half")
    stray = store.memory_file("boot-1")
    stray.write_bytes(b"half")
    of_containers = store.directory / "containers" / "k2"
    of_containers.mkdir(parents=True)
    assert store.find("half") is None
    assert keys(store) == ["k1"]
    store.sweep()
    assert not files.directory.exists()
    assert not stray.exists()
    assert of_containers.is_dir(), "daemons of containers may share the directory"
    assert store.find("k1") is not None


@pytest.mark.parametrize("which", ["memory", "devices", "disk.qcow2"])
def test_a_damaged_file_is_named_and_the_template_is_removed(which: str, store: QemuTemplateStore) -> None:
    manifest = add_template(store, "k1")
    path = Path(manifest.memory_path) if which == "memory" else store.directory / "k1" / which
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TemplateCorrupt, match=rf"{path.name} has digest [0-9a-f]+, expected [0-9a-f]+"):
        store.find("k1")
    assert store.find("k1") is None
    assert not Path(manifest.memory_path).exists()


@pytest.mark.parametrize("name", ["devices", "disk.qcow2", "overlay.qcow2"])
def test_a_template_with_a_missing_file_is_corrupt(name: str, store: QemuTemplateStore) -> None:
    add_template(store, "k1")
    (store.directory / "k1" / name).unlink()
    with pytest.raises(TemplateCorrupt, match=name):
        store.find("k1")
    assert store.find("k1") is None


@pytest.mark.parametrize("text", ["", "{", '{"key": "k1"}', '{"unknown": 1}'])
def test_a_template_with_an_invalid_manifest_is_corrupt(text: str, store: QemuTemplateStore) -> None:
    add_template(store, "k1")
    (store.directory / "k1" / "snapshot.json").write_text(text)
    assert keys(store) == []
    with pytest.raises(TemplateCorrupt, match="manifest"):
        store.find("k1")
    assert not store.memory_file("k1").exists()


def test_a_memory_file_lost_in_a_host_restart_is_not_corruption(tmp_path: Path) -> None:
    store = QemuTemplateStore(tmp_path / "templates", memory_dir=tmp_path / "shm", limit_bytes=LIMIT)
    manifest = add_template(store, "k1")
    assert Path(manifest.memory_path).parent == tmp_path / "shm"
    Path(manifest.memory_path).unlink()
    assert store.find("k1") is None
    assert keys(store) == []


def test_pruning_removes_the_least_recently_used_and_keeps_those_in_use(tmp_path: Path) -> None:
    size = 1 << 20
    for key, use_time_s in (("old", 1000.0), ("used", 500.0), ("new", 2000.0)):
        earlier = store_at(tmp_path)
        add_template(earlier, key, size=size, use_time_s=use_time_s)
        earlier.close()
    store = store_at(tmp_path, limit_bytes=int(2.5 * size))
    assert keys(store) == ["used", "old", "new"]
    assert store.find("used") is not None
    # `find` counts as a use and marks it as in use by this store; undo the former.
    os.utime(store.directory / "used" / "snapshot.json", (500.0, 500.0))
    assert store.prune() == ["old"]
    assert keys(store) == ["used", "new"]
    assert store.prune(limit_bytes=0) == ["new"]
    assert keys(store) == ["used"]


def test_holes_and_zeros_have_the_same_digest_and_other_bytes_another(tmp_path: Path) -> None:
    hole, zeros, other, longer = (tmp_path / name for name in ("hole", "zeros", "other", "longer"))
    size = 3 << 20
    with hole.open("wb") as file:
        file.truncate(size)
        os.pwrite(file.fileno(), b"x", 2 << 20)
    content = bytearray(size)
    content[2 << 20] = ord("x")
    zeros.write_bytes(content)
    longer.write_bytes(content + b"\0")
    content[5] = 1
    other.write_bytes(content)
    assert digest_file(hole) == digest_file(zeros)
    assert len({digest_file(zeros), digest_file(other), digest_file(longer)}) == 3


def test_memory_blocks_are_parsed_by_name_and_unnamed_ones_are_ignored() -> None:
    output = """\
              Block Name    PSize              Offset               Used              Total
                            4 KiB  0x0000000000000000 0x0000000040000000 0x0000000040000000
                 env.ram    4 KiB  0x0000000040000000 0x0000000040000000 0x0000000040000000
   0000:00:01.0/vga.vram    4 KiB  0x0000000080080000 0x0000000000800000 0x0000000000800000
    /rom@etc/acpi/tables    4 KiB  0x00000000808c0000 0x0000000000020000 0x0000000000200000\r
"""
    assert parse_memory_blocks(output) == {
        "env.ram": 1 << 30,
        "0000:00:01.0/vga.vram": 8 << 20,
        "/rom@etc/acpi/tables": 128 << 10,
    }


#: A daemon that needs the template `k1`: it boots it unless it is there, says so, and uses it until it ends.
DAEMON = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore
from tests.support.qemu_templates import add_template
store = QemuTemplateStore(Path(sys.argv[1]), memory_dir=Path(sys.argv[2]), limit_bytes=1 << 30)
async def main():
    async with store.booting("k1"):
        if store.find("k1"):
            print("loaded", flush=True)
        else:
            await asyncio.sleep(0.2)
            add_template(store, "k1")
            print("booted", flush=True)
asyncio.run(main())
sys.stdin.read()
"""


@contextmanager
def daemon(directory: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    paths = [str(directory / "templates"), str(directory / name), str(Path(__file__).parents[5])]
    command = [sys.executable, "-c", DAEMON, *paths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_of_two_daemons_one_boots_a_template_and_both_use_its_memory_file(tmp_path: Path) -> None:
    with daemon(tmp_path, "a") as first, daemon(tmp_path, "b") as second:
        assert sorted([said(first), said(second)]) == ["booted", "loaded"]
        memories = list(tmp_path.glob("*/*.ram"))
        assert len(memories) == 1, "two copies would be two in the page cache"


def test_a_template_that_another_daemon_uses_is_not_pruned(tmp_path: Path, store: QemuTemplateStore) -> None:
    with daemon(tmp_path, "a") as user:
        assert said(user) == "booted"
        store.sweep()
        assert store.prune(limit_bytes=0) == []
        assert keys(store) == ["k1"]
    # The daemon was killed: the kernel has released its lock.
    assert store.prune(limit_bytes=0) == ["k1"]
    assert keys(store) == []


async def test_a_template_that_another_daemon_is_writing_is_not_swept(tmp_path: Path) -> None:
    writer, store = store_at(tmp_path), store_at(tmp_path)
    async with writer.booting("k1"):
        files = writer.begin("k1")
        store.sweep()
        assert files.directory.exists()
    store.sweep()
    assert not files.directory.exists()


def test_another_qemu_processor_image_size_or_layout_is_another_template(store: QemuTemplateStore) -> None:
    image = DiskImage(name="desktop", digest="d" * 64, disk=Path("/disk.qcow2"))
    spec = MachineSpec(machine_id="m", image=image, memory_mib=512)

    def key(*, spec: MachineSpec = spec, versions: str = "QEMU 7.2.22", cpu: str = "a") -> str:
        return Freezer(store, accelerator=Accelerator.KVM, versions=versions, cpu=cpu).key(spec)

    others = {
        key(versions="QEMU 7.2.23"),
        key(cpu="b"),
        key(spec=replace(spec, memory_mib=513)),
        key(spec=replace(spec, keyboard_layout="de")),
        key(spec=replace(spec, image=replace(image, digest="e" * 64))),
    }
    assert len(others - {key()}) == 5
    assert key(spec=replace(spec, machine_id="n")) == key()
