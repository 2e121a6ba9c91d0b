"""`envd image`: builds, imports, lists, shows and removes guest images."""

import asyncio
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit, emit_json, err, out, progress
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.image_build import app as build_app
from envd.cli.image_output import give_to_sudo_user, parse_screen, print_image
from envd.cli.options import config_options
from envd.cli.templates import app as templates_app
from envd.cli.terminal import columns, stop_on_sigterm
from envd.hypervisor.machine import ExtraDrive, Firmware, GuestOs, Hardware
from envd.hypervisor.oci.images import remove_unpacked
from envd.images.catalogue import ImageCatalogue, ImportedDisk, disk_format_of
from envd.images.containerfile import write_container_files
from envd.images.oci_archive import import_archive

app = typer.Typer(no_args_is_help=True, help="Build, import and list guest images.")
app.add_typer(build_app, name="build")
app.add_typer(templates_app, name="templates")

Name = Annotated[str, typer.Argument(metavar="NAME", help="An image, by NAME or NAME@DIGEST.")]


@app.command("import")
@command(config_options("cache_dir"))
def import_(
    settings: Config,
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A bootable disk, such as a qcow2 file, or with --oci an archive.")
    ],
    oci: Annotated[
        bool, typer.Option("--oci", help="FILE is an archive of a container image, for --hypervisor oci:.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the image.", show_default="the file's name")] = "",
    os_family: Annotated[GuestOs, typer.Option("--os", help="System that tasks find in it.")] = GuestOs.LINUX,
    firmware: Annotated[Firmware, typer.Option(help="Firmware: bios or uefi.")] = Firmware.BIOS,
    hardware: Annotated[
        Hardware | None, typer.Option(help="Virtual devices.", show_default="virtio; for Windows pc")
    ] = None,
    disk_format: Annotated[str, typer.Option("--format", help="qcow2 or raw.", show_default="the file's")] = "",
    screen: Annotated[str, typer.Option(help="Screen size, WIDTHxHEIGHT.")] = "1280x800",
    credentials: Annotated[str, typer.Option(help="Source of its password: env:NAME or file:PATH.")] = "",
    guestd: Annotated[bool, typer.Option(help="Whether the guest runs an OSWorld-compatible service.")] = True,
    provides: Annotated[
        list[str] | None,
        typer.Option(help="What tasks may need of it, such as powershell.", show_default="powershell in Windows"),
    ] = None,
    drive: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="An additional disk (qcow2). May be repeated.")
    ] = None,
    cdrom: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A CD-ROM in each machine (ISO). May be repeated.")
    ] = None,
    firmware_vars: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UEFI variables to boot with.", show_default="the firmware's")
    ] = None,
    tpm_state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TPM state to boot with, as written by swtpm.", show_default="a new TPM"),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the disks into the cache.")] = False,
    as_json: Json = False,
) -> None:
    """Register an existing disk, or an archive of a container image, as an image."""
    stop_on_sigterm()
    screen_px = parse_screen(screen)
    name = name or re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")
    if oci:
        of_disks = (hardware, disk_format, credentials, drive, cdrom, firmware_vars, tpm_state, copy, not guestd)
        if any(of_disks) or os_family is not GuestOs.LINUX or firmware is not Firmware.BIOS:
            raise ConfigError("--oci: takes --name, --screen and --provides; the other options are those of disks")
        with progress(f"image {name}") as report:
            image = import_archive(
                ImageCatalogue(settings.cache_dir), name, file,
                screen_px=screen_px, provides=provides or (), progress=report,
            )  # fmt: skip
        give_to_sudo_user(settings.cache_dir)
        print_image(image, as_json=as_json)
        return
    disk_format = disk_format or disk_format_of(file) or "qcow2"
    if disk_format not in {"qcow2", "raw"}:
        raise ConfigError(f"--format {disk_format}: unknown format; use qcow2 or raw")
    given = ImportedDisk(
        file=file,
        disk_format=disk_format,
        os_family=os_family,
        firmware=firmware,
        hardware=hardware,
        screen_px=screen_px,
        credentials=credentials,
        has_guestd=guestd,
        provides=provides,
        firmware_vars=firmware_vars,
        tpm_state=tpm_state,
        drives=[
            *(ExtraDrive(path=path) for path in drive or ()),
            *(ExtraDrive(path=path, disk_format="raw", is_cdrom=True) for path in cdrom or ()),
        ],
    )
    with progress(f"image {name}") as report:
        image = ImageCatalogue(settings.cache_dir).import_file(
            name, given, copy=copy, progress=lambda fraction: report("reading the disk", fraction)
        )
    give_to_sudo_user(settings.cache_dir)
    print_image(image, as_json=as_json)


@app.command("files")
@command()
def files(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
) -> None:
    """Write a Containerfile and the desktop's files, to make a container image that can be imported."""
    try:
        write_container_files(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror or error}; choose a new directory") from error
    out.print(f"{directory}: edit its Containerfile, then build it", markup=False, soft_wrap=True)


@app.command("list")
@command(config_options("cache_dir"))
def list_(settings: Config, *, as_json: Json = False) -> None:
    """List the images of this host, each by the shortest name that other commands take for it."""
    catalogue = ImageCatalogue(settings.cache_dir)
    images = catalogue.list()
    if as_json:
        emit_json({"images": [{**asdict(image), "current": catalogue.is_current(image)} for image in images]})
        return
    if not images:
        err.print(f"no images in {catalogue.root}; build one with `envd image build desktop`", soft_wrap=True)
        return
    rows = (
        (
            image.name if catalogue.is_current(image) else f"{image.name}@{image.digest[:8]}",
            image.digest[:12],
            image.os,
            image.firmware,
            f"{image.screen_width_px}x{image.screen_height_px}",
            image.created[:16].replace("T", " "),
            "" if catalogue.disk_of(image).exists() else f"{catalogue.disk_of(image)} is missing",
        )
        for image in images
    )
    headings = ("name", "digest", "os", "firmware", "screen", "created", "")
    out.print(columns(headings, rows, whole=("name", "digest")))


@app.command("show")
@command(config_options("cache_dir"))
def show(settings: Config, *, name: Name, as_json: Json = False) -> None:
    """Show one image."""
    print_image(ImageCatalogue(settings.cache_dir).get(name), as_json=as_json)


@app.command("rm")
@command(config_options("cache_dir"))
def remove(settings: Config, *, name: Name, as_json: Json = False) -> None:
    """Remove one image (NAME@DIGEST) or all with a NAME. A disk that was imported in place is kept."""
    catalogue = ImageCatalogue(settings.cache_dir)
    asyncio.run(remove_unpacked(catalogue.root, catalogue.removal(name)))
    removed = catalogue.remove(name)
    emit({"removed": str(removed)}, f"removed image {name} ({removed})", as_json=as_json)
