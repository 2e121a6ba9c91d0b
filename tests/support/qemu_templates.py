"""Stored templates of invented files."""

import os

from envd.hypervisor.qemu.snapshots.files import SnapshotManifest, digest_file
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore


def add_template(store: QemuTemplateStore, key: str, *, size: int = 8192, use_time_s: float = 0.0) -> SnapshotManifest:
    """Store a template whose files use about `size` bytes together."""
    files = store.begin(key)
    memory = store.memory_file(key)
    memory.write_bytes(os.urandom(size))
    for path in (files.devices, files.disk, files.seed):
        path.write_bytes(key.encode())
    manifest = SnapshotManifest(
        key=key,
        image="desktop",
        image_digest="d" * 64,
        memory_mib=1024,
        vcpu_count=2,
        screen="1280x800",
        accelerator="tcg",
        hypervisor="libvirt 9, QEMU 7",
        memory_path=str(memory),
        memory_digest=digest_file(memory),
        devices_digest=digest_file(files.devices),
        disk_digest=digest_file(files.disk),
        create_time="2030-01-01T00:00:00+00:00",
        notes={"first_frame_id": "f"},
    )
    store.complete(files, manifest)
    if use_time_s:
        os.utime(files.manifest, (use_time_s, use_time_s))
    return manifest
