"""Archives of small container images, written by tests."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from envd.guests.guestd import VERSION
from envd.images.recipe import desktop_recipe, overlay_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of a layer."""

    path: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0


def directory(path: str, **more: Any) -> Entry:
    return Entry(path=path, kind=tarfile.DIRTYPE, **{"mode": 0o755, **more})


def link(path: str, target: str) -> Entry:
    return Entry(path=path, kind=tarfile.SYMTYPE, link=target)


#: All that makes a desktop of a container image, by path: each file alone can be left out.
DESKTOP: Mapping[str, Entry] = {
    entry.path: entry
    for entry in (
        directory("usr/bin"),
        link("bin", "usr/bin"),
        Entry(path="etc/passwd", content=b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/bash\n"),
        directory("home/user", uid=1000),
        Entry(path="usr/lib/envd/session", content=overlay_files(desktop_recipe())["usr/lib/envd/session"], mode=0o755),
        Entry(path="usr/lib/envd/environment", content=b"DISPLAY=:0\n"),
        Entry(path="usr/lib/envd/guestd/__init__.py", content=f'VERSION = "{VERSION}"\n'.encode()),
        *(
            Entry(path=path, content=b"#!", mode=0o755)
            for path in (
                "usr/bin/Xtigervnc",
                "usr/sbin/qemu-ga",
                "usr/bin/openbox",
                "usr/bin/tint2",
                "usr/bin/dbus-daemon",
                "usr/bin/python3",
                "usr/bin/setpriv",
                "usr/bin/sh",
            )
        ),
    )
}

Layer = Sequence[Entry]

COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "+gzip": gzip.compress,
    "+zstd": zstandard.ZstdCompressor().compress,
}


def layer_bytes(layer: Layer) -> bytes:
    """Return a layer as an archive of tar."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for entry in layer:
            info = tarfile.TarInfo(entry.path)
            info.type, info.linkname, info.mode, info.uid = entry.kind, entry.link, entry.mode, entry.uid
            info.size = len(entry.content)
            tar.addfile(info, io.BytesIO(entry.content))
    return stream.getvalue()


class ArchiveWriter:
    """Writes an archive in OCI's image layout."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: list[dict[str, Any]] = []

    def add_blob(self, data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def add_image(self, layers: Sequence[Layer], *, compression: str = "+gzip", architecture: str = "amd64") -> None:
        unpacked = [layer_bytes(layer) for layer in layers]
        diff_ids = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in unpacked]
        rootfs = {"type": "layers", "diff_ids": diff_ids}
        config = {"os": "linux", "architecture": architecture, "rootfs": rootfs}
        manifest = {
            "schemaVersion": 2,
            "config": self.add_blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [self.add_blob(COMPRESS[compression](data), f"layer.v1.tar{compression}") for data in unpacked],
        }
        described = self.add_blob(json.dumps(manifest).encode(), "manifest.v1+json")
        self.manifests.append({**described, "platform": {"os": "linux", "architecture": architecture}})

    def write(self, file: Path) -> Path:
        index = {"schemaVersion": 2, "manifests": self.manifests}
        documents = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode()}
        blobs = {f"blobs/sha256/{digest}": data for digest, data in self.blobs.items()}
        with tarfile.open(file, "w") as tar:
            for name, data in {**documents, **blobs}.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return file


def write_archive(file: Path, layers: Sequence[Layer], **more: Any) -> Path:
    """Write an archive of one image; `more` as for `ArchiveWriter.add_image`."""
    writer = ArchiveWriter()
    writer.add_image(layers, **more)
    return writer.write(file)
