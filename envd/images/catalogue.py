"""Catalogue of this host's images.

```text
<cache>/images/<name>/<digest16>/image.json    manifest; the image's files are in the same directory
<cache>/images/<name>/current                  symbolic link to the digest that the plain name refers to
```
An image is published by one rename and never changed afterwards, so readers never see a partial one.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from cuaenv.problems import did_you_mean
from envd.base.config import DEFAULT_IMAGE, check_image_name
from envd.base.errors import ImageError, ImageNotFound
from envd.guests.guestd import VERSION as GUESTD_VERSION
from envd.hypervisor.machine import DiskImage, ExtraDrive, Firmware, GuestOs, Hardware

DIGEST_CHARS = 16
#: Installed packages of an image that envd built: a name and version per line. In the image's directory.
PACKAGES_FILE = "packages.txt"
_MANIFEST = "image.json"
_VARS_FILE = "vars.fd"
_TPM_FILE = "tpm2-00.permall"
_BUILDING = ".building-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One registered image."""

    name: str
    digest: str
    """sha256 hex: of the recipe for built images, of the disk for imported ones."""
    disk: str
    """File name in the image's directory, or an absolute path for an image registered in place."""
    disk_sha256: str
    disk_bytes: int = 0
    """Size of the disk's file when the image was published; 0 in images of earlier versions."""
    disk_format: str = "qcow2"
    """`qcow2` or `raw`; `tar` for the files of a container."""
    os: str = GuestOs.LINUX.value
    hardware: str = Hardware.VIRTIO.value
    firmware: str = Firmware.DIRECT_KERNEL.value
    kernel: str = ""
    initrd: str = ""
    kernel_cmdline: str = ""
    firmware_vars: str = ""
    """File of the UEFI variables that its machines boot with; empty for the firmware's defaults."""
    tpm_state: str = ""
    """File of the TPM's state that its machines boot with; empty for a new TPM."""
    drives: tuple[dict[str, str], ...] = ()
    """Additional drives: `file`, `format`, and `kind`, which is `disk` or `cdrom`."""
    has_guestd: bool = True
    guestd_version: str = ""
    """Version of envd's guestd in it; empty in imported disks, and in images that earlier versions built."""
    provides: tuple[str, ...] = ()
    """What tasks may need beyond the operating system."""
    screen_width_px: int = 1280
    screen_height_px: int = 800
    credentials: str = ""
    """Source of the guest's password, `env:NAME` or `file:PATH`; never the password itself."""
    created: str = ""
    """ISO 8601, UTC."""
    expires: str = ""
    """End of an evaluation period: ISO 8601, UTC; empty for never."""
    source: dict[str, str] = field(default_factory=dict)
    """Origin of the image."""

    @property
    def expire_time(self) -> datetime | None:
        """When an evaluation ends; None for never."""
        return datetime.fromisoformat(self.expires) if self.expires else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedDisk:
    """An existing disk that becomes an image, and the machines that boot it."""

    file: Path
    disk_format: str = "qcow2"
    """`qcow2` or `raw`."""
    os_family: GuestOs
    """The operating system that tasks find in it."""
    firmware: Firmware
    """BIOS or UEFI."""
    hardware: Hardware | None = None
    """The devices that its machines get; None for virtio in Linux and PC in Windows."""
    screen_px: tuple[int, int] = (1280, 800)
    """(width, height)."""
    credentials: str = ""
    """`env:NAME` or `file:PATH`, or empty."""
    has_guestd: bool = True
    """Whether guestd runs in it."""
    provides: Sequence[str] | None = None
    """What tasks may need of it; None for PowerShell in Windows and nothing in Linux."""
    firmware_vars: Path | None = None
    """UEFI variables that its machines boot with; always copied. None for the firmware's defaults."""
    tpm_state: Path | None = None
    """State of the TPM that its machines boot with, as swtpm writes it (`tpm2-00.permall`); always copied. None for a
    new TPM."""
    drives: Sequence[ExtraDrive] = ()
    """Additional drives."""


class ImageCatalogue:
    """Images in one cache directory."""

    def __init__(self, cache_dir: Path) -> None:
        self.root = cache_dir / "images"

    def list(self) -> tuple[Image, ...]:
        """Return every image, sorted by name; of each name the current one first. Raises: ImageError."""
        found: tuple[Image, ...] = ()
        for directory in sorted(self.root.glob("*/")):
            digests = [entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink()]
            images = [_read(entry) for entry in sorted(digests) if (entry / _MANIFEST).exists()]
            found += tuple(sorted(images, key=lambda image: not self.is_current(image)))
        return found

    def is_current(self, image: Image) -> bool:
        """Return whether the image's name alone, without a digest, means this one."""
        current = self.root / image.name / "current"
        return current.is_symlink() and os.readlink(current) == image.digest[:DIGEST_CHARS]

    def get(self, name: str) -> Image:
        """Return an image by `name` (the current one) or `name@digest-prefix`.

        Raises:
            ImageNotFound: There is none; the message lists all images.
        """
        return _read(self._directory(name))

    def find(self, name: str, digest: str) -> Image | None:
        directory = self.root / name / digest[:DIGEST_CHARS]
        return _read(directory) if (directory / _MANIFEST).exists() else None

    def disk_image(self, name: str) -> DiskImage:
        directory = self._directory(name)
        image = _read(directory)

        def present(file: str) -> Path:
            path = directory / file
            if not path.exists():
                raise ImageError(f"image {name}: {path} does not exist; remove the image and build or import it again")
            return path

        # Only images that envd built name their distribution.
        is_ours = "distribution" in image.source
        if image.has_guestd and (is_ours or image.guestd_version) and image.guestd_version != GUESTD_VERSION:
            remedy = (
                f"run `envd image build {image.name}`" if is_ours else "make it with `envd image files`, and import it"
            )
            raise ImageError(
                f"image {name}: an earlier version of envd built it, with a guestd that this one cannot use; {remedy}"
            )
        disk = present(image.disk)
        if image.disk_bytes and (size := disk.stat().st_size) != image.disk_bytes:
            raise ImageError(
                f"image {name}: {disk} is damaged: it has {size} bytes instead of {image.disk_bytes};"
                " remove the image and build or import it again"
            )
        return DiskImage(
            name=image.name,
            digest=image.digest,
            disk=disk,
            disk_format=image.disk_format,
            os=GuestOs(image.os),
            hardware=Hardware(image.hardware),
            firmware=Firmware(image.firmware),
            kernel=present(image.kernel) if image.kernel else None,
            initrd=present(image.initrd) if image.initrd else None,
            kernel_cmdline=image.kernel_cmdline,
            has_guestd=image.has_guestd,
            provides=frozenset(image.provides),
            packages="".join(f"{line}\n" for line in self._packages(image)),
            expire_time=image.expire_time,
            firmware_vars=present(image.firmware_vars) if image.firmware_vars else None,
            tpm_state=present(image.tpm_state) if image.tpm_state else None,
            drives=tuple(
                ExtraDrive(path=present(drive["file"]), disk_format=drive["format"], is_cdrom=drive["kind"] == "cdrom")
                for drive in image.drives
            ),
        )

    def find_built(self, name: str, recipe: str) -> Image | None:
        """Return an image that was built from a recipe's digest, if its own digest is another: the newest, or None."""
        built = (image for image in self.list() if image.name == name and image.source.get("recipe") == recipe)
        return max(built, key=lambda image: image.created, default=None)

    def disk_of(self, image: Image) -> Path:
        return self.root / image.name / image.digest[:DIGEST_CHARS] / image.disk

    def packages(self, image: Image) -> frozenset[str] | None:
        """Return the names of the packages installed in an image that envd built; None for an imported one."""
        return frozenset(line.split()[0] for line in self._packages(image)) or None

    def _packages(self, image: Image) -> tuple[str, ...]:
        listed = self.root / image.name / image.digest[:DIGEST_CHARS] / PACKAGES_FILE
        return tuple(listed.read_text().splitlines()) if listed.exists() else ()

    def removal(self, name: str) -> Path:
        """Return the directory that `remove` would remove. Raises: ImageNotFound."""
        directory = self._directory(name, remedy="; `envd image list` lists all")
        return directory if "@" in name else directory.parent

    def remove(self, name: str) -> Path:
        """Remove an image by `name` (all its digests) or `name@digest-prefix`; returns the removed directory.

        An image registered in place keeps its disk file. Raises: ImageNotFound.
        """
        removed = self.removal(name)
        shutil.rmtree(removed)
        current = (removed.parent if "@" in name else removed) / "current"
        if current.is_symlink() and not current.exists():
            current.unlink()
        return removed

    def import_file(
        self, name: str, given: ImportedDisk, *, copy: bool = False, progress: Callable[[float], None] | None = None
    ) -> Image:
        """Register an existing disk, in place or as a copy.

        Args:
            copy: Copy the disks into the catalogue instead of registering them in place.

        Raises:
            ImageError: A file cannot be read, `credentials` is invalid, or the settings contradict each other.
        """
        try:
            check_image_name(name)
        except ValueError as error:
            raise ImageError(f"image name {error}") from error
        if (actual := disk_format_of(given.file)) != given.disk_format:
            remedy = f"choose the format {actual}" if actual else "convert it with qemu-img convert"
            raise ImageError(f"image {name}: {given.file} is not a {given.disk_format} disk; {remedy}")
        hardware = given.hardware or _default_hardware(given.os_family)
        _require_bootable(name, given, hardware)
        if given.credentials and given.credentials.partition(":")[0] not in {"env", "file"}:
            raise ImageError(f"image {name}: credentials must be env:NAME or file:PATH, never the secret itself")
        digest, disk_sha256 = _digests(name, given, progress)
        with self.staging(name) as directory:

            def place(source: Path, target: str) -> str:
                """Copy a disk if asked to; return its entry in the manifest."""
                if not copy:
                    return str(source.resolve())
                return place_copy(source, target)

            def place_copy(source: Path | None, target: str) -> str:
                if source is None:
                    return ""
                shutil.copyfile(source, directory / target)
                return target

            provides = given.provides
            image = Image(
                name=name,
                digest=digest,
                disk=place(given.file, f"disk.{given.disk_format}"),
                disk_sha256=disk_sha256,
                disk_format=given.disk_format,
                os=given.os_family.value,
                hardware=hardware.value,
                firmware=given.firmware.value,
                firmware_vars=place_copy(given.firmware_vars, _VARS_FILE),
                tpm_state=place_copy(given.tpm_state, _TPM_FILE),
                drives=tuple(
                    {
                        "file": place(drive.path, f"drive{index}"),
                        "format": drive.disk_format,
                        "kind": "cdrom" if drive.is_cdrom else "disk",
                    }
                    for index, drive in enumerate(given.drives)
                ),
                has_guestd=given.has_guestd,
                provides=_default_features(given.os_family, given.firmware) if provides is None else tuple(provides),
                screen_width_px=given.screen_px[0],
                screen_height_px=given.screen_px[1],
                credentials=given.credentials,
                source={"imported": str(given.file.resolve())},
            )
            return self.publish(directory, image)

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """Yield a directory to prepare an image in. It is removed at the end unless it was published."""
        parent = self.root / name
        parent.mkdir(parents=True, exist_ok=True)
        self._remove_stale(parent)
        directory = Path(tempfile.mkdtemp(prefix=f"{_BUILDING}{os.getpid()}-", dir=parent))
        # With mkdtemp's mode 0700 an unprivileged QEMU could not read its base disk.
        directory.chmod(0o755)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            if not any(parent.iterdir()):
                parent.rmdir()

    def publish(self, directory: Path, image: Image) -> Image:
        """Publish a staged image in one rename, and make it current under its name."""
        disk = directory / image.disk
        image = replace(
            image,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            disk_bytes=disk.stat().st_size if disk.exists() else 0,
        )
        (directory / _MANIFEST).write_text(json.dumps(asdict(image), indent=2) + "\n")
        target = directory.parent / image.digest[:DIGEST_CHARS]
        if target.exists():
            shutil.rmtree(target)
        directory.rename(target)
        self.make_current(image)
        return image

    def make_current(self, image: Image) -> None:
        """Make a published image the one that its plain name refers to."""
        parent = self.root / image.name
        link = parent / f".current-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(image.digest[:DIGEST_CHARS])
        link.rename(parent / "current")

    def _directory(
        self, name: str, *, remedy: str = "; create it with `envd image build` or `envd image import`"
    ) -> Path:
        plain, _, digest = name.partition("@")
        parent = self.root / plain
        matches = [parent / "current"] if not digest else sorted(parent.glob(f"{digest}*"))
        found = [match.resolve() for match in matches if (match / _MANIFEST).exists()]
        if plain and len(found) > 1:
            raise ImageNotFound(f"image {name!r}: {len(found)} digests begin so; give more of its digits")
        if len(found) != 1 or not plain:
            known = sorted({image.name for image in self.list()})
            listed = f"image {name!r}: not found in {self.root} (available: {', '.join(known) or 'none'})"
            raise ImageNotFound(listed + (did_you_mean(plain, {*known, DEFAULT_IMAGE} - {plain}) or remedy))
        return found[0]

    @staticmethod
    def _remove_stale(parent: Path) -> None:
        """Remove staging directories of processes that were killed and could not clean up."""
        for entry in parent.glob(f"{_BUILDING}*"):
            pid = entry.name.removeprefix(_BUILDING).partition("-")[0]
            if not Path("/proc", pid).exists():
                shutil.rmtree(entry, ignore_errors=True)


def _digests(name: str, given: ImportedDisk, progress: Callable[[float], None] | None) -> tuple[str, str]:
    """Return the digests (sha256, hex) of all files together, and of the disk alone. Raises: ImageError."""
    others = (*(drive.path for drive in given.drives), given.firmware_vars, given.tpm_state)
    digests = []
    for path in filter(None, (given.file, *others)):
        try:
            digests.append(_sha256(path, progress if path == given.file else None))
        except OSError as error:
            raise ImageError(f"image {name}: {path} cannot be read: {error.strerror}; check the path") from error
    both = digests[0] if len(digests) == 1 else hashlib.sha256("\0".join(digests).encode()).hexdigest()
    return both, digests[0]


def disk_format_of(file: Path) -> str:
    """Return `qcow2`, `raw` for a disk with a boot record, or an empty string. Raises: ImageError: It is unreadable."""
    try:
        with file.open("rb") as disk:
            start = disk.read(512)
    except OSError as error:
        raise ImageError(f"{file}: cannot be read: {error.strerror}") from error
    if start.startswith(b"QFI\xfb"):
        return "qcow2"
    return "raw" if start[510:] == b"\x55\xaa" else ""


def _require_bootable(name: str, given: ImportedDisk, hardware: Hardware) -> None:
    firmware = given.firmware
    if firmware in {Firmware.DIRECT_KERNEL, Firmware.NONE}:
        raise ImageError(f"image {name}: an imported disk cannot boot a separate kernel; choose bios or uefi")
    if hardware is Hardware.WINDOWS and firmware is not Firmware.UEFI:
        raise ImageError(f"image {name}: hardware windows boots by UEFI, not {firmware.value}; choose uefi")
    if given.firmware_vars is not None and firmware is not Firmware.UEFI:
        raise ImageError(f"image {name}: UEFI variables are for images that boot by UEFI; choose uefi, or omit them")
    if given.tpm_state is not None and hardware is not Hardware.WINDOWS:
        raise ImageError(
            f"image {name}: hardware {hardware.value} has no TPM; choose hardware windows, or omit the TPM's state"
        )


def _default_hardware(os_family: GuestOs) -> Hardware:
    return Hardware.PC if os_family is GuestOs.WINDOWS else Hardware.VIRTIO


def _default_features(os_family: GuestOs, firmware: Firmware) -> tuple[str, ...]:
    # A guest with a Linux kernel of its own is not Windows, whatever tasks find in it.
    return ("powershell",) if os_family is GuestOs.WINDOWS and firmware is not Firmware.DIRECT_KERNEL else ()


def _read(directory: Path) -> Image:
    path = directory / _MANIFEST
    try:
        fields = json.loads(path.read_text())
        # Manifests of earlier versions name neither the hardware nor what the image provides.
        os_family = GuestOs(fields.get("os", GuestOs.LINUX))
        firmware = Firmware(fields.get("firmware", Firmware.DIRECT_KERNEL))
        fields.setdefault("hardware", _default_hardware(os_family).value)
        fields["provides"] = tuple(fields.get("provides", _default_features(os_family, firmware)))
        fields["drives"] = tuple(fields.get("drives", ()))
        return Image(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ImageError(f"image manifest {path}: cannot be read: {error}; remove its directory") from error


def _sha256(file: Path, progress: Callable[[float], None] | None) -> str:
    digest = hashlib.sha256()
    size = max(1, file.stat().st_size)
    done = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            done += len(block)
            if progress:
                progress(done / size)
    return digest.hexdigest()


def file_sha256(file: Path) -> str:
    return _sha256(file, None)
