"""`envd image build windows`: installs Windows from an ISO and seals it as an image."""

import asyncio
import os
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer
from lxml import etree

from cuaenv.cli.terminal import Json, ProgressReport, emit_json, err, out, progress
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.image_output import give_to_sudo_user, parse_screen, print_image
from envd.cli.options import config_options
from envd.cli.terminal import stop_on_sigterm
from envd.daemon.state_lock import holder, locked
from envd.hypervisor.machine import Accelerator, DiskImage, ExtraDrive, MachineSpec
from envd.hypervisor.qemu.domain_xml import domain_xml
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.hypervisor.qemu.host import find_firmware
from envd.hypervisor.qemu.snapshots.files import QemuFiles
from envd.images.catalogue import Image, ImageCatalogue
from envd.images.windows.build import BuildLimits, build_windows
from envd.images.windows.media import EVALUATIONS, VIRTIO_WIN, MediaDownload, Release, download
from envd.images.windows.plan import ANSWER_FILE, USER, BuildPlan, WindowsOptions, plan_build, write_media

_DOMAIN = "domain.xml"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@command(config_options("cache_dir", "accelerator"))
def windows(
    settings: Config,
    *,
    iso: Annotated[Path | None, typer.Option(help="Installation ISO of Windows for x64.")] = None,
    virtio_win: Annotated[Path | None, typer.Option(help="virtio-win ISO, with drivers and the guest agent.")] = None,
    fetch: Annotated[
        Release | None,
        typer.Option(
            "--download", help="Download what --iso and --virtio-win do not name: an evaluation of a release."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the image.", show_default="the release, such as win11")] = "",
    edition: Annotated[
        str, typer.Option(help="Edition, by name, identifier or index.", show_default="the only one")
    ] = "",
    language: Annotated[str, typer.Option(help="Language, such as de-DE.", show_default="that of the ISO")] = "",
    keyboard: Annotated[
        str, typer.Option(help="Keyboard: a language or an identifier.", show_default="that of the language")
    ] = "",
    time_zone: Annotated[str, typer.Option(help="Time zone, by Windows' own name.")] = "UTC",
    key: Annotated[
        str, typer.Option(metavar="SOURCE", help="Product key: env:NAME, file:PATH or none. Evaluations need none.")
    ] = "",
    screen: Annotated[str, typer.Option(help="Screen size, WIDTHxHEIGHT.")] = "1280x720",
    program: Annotated[
        list[str] | None,
        typer.Option(metavar="'FILE [ARGUMENT...]'", help="Installer to run: .msi, .exe or .ps1; repeatable."),
    ] = None,
    disk_gib: Annotated[int, typer.Option(help="Size of the disk; it takes space only as it is used.")] = 64,
    memory_mib: Annotated[int, typer.Option(min=2048, help="Memory of the machine.")] = 4096,
    vcpus: Annotated[int, typer.Option(min=1, help="Processors of the machine.")] = 4,
    still_s: Annotated[float, typer.Option("--still", min=1, help="Seconds without a change of the screen.")] = 300,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build even if the image exists.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the discs and the machine's XML to DIR; start nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Install Windows from its ISO, prove that it works for agents, and seal it. Takes 20 to 60 minutes with KVM."""
    stop_on_sigterm()
    width_px, height_px = parse_screen(screen)
    catalogue = ImageCatalogue(settings.cache_dir)
    with progress("windows") as report:
        options = WindowsOptions(
            iso=_medium(iso, EVALUATIONS[fetch] if fetch else None, "--iso", settings, report),
            virtio_win=_medium(virtio_win, VIRTIO_WIN if fetch else None, "--virtio-win", settings, report),
            edition=edition,
            language=language,
            keyboard=keyboard,
            time_zone=time_zone,
            product_key=_key(key),
            screen_width_px=width_px,
            screen_height_px=height_px,
            programs=tuple(program or ()),
            disk_gib=disk_gib,
        )
        plan = plan_build(options, directory=dry_run or settings.cache_dir)
        name = name or plan.edition.release.value
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--name {name}: not a name; use lower-case letters, digits and hyphens")
        if dry_run is not None:
            media = _dry_run(plan, dry_run, memory_mib=memory_mib, vcpu_count=vcpus)
            _print_media(plan, dry_run, media, as_json=as_json)
            return
        recipe = plan.digest(report)
        image = None if rebuild else catalogue.find_built(name, recipe)
        if image is None:
            image = _build(
                plan, settings, catalogue, name=name, recipe=recipe, memory_mib=memory_mib, vcpu_count=vcpus,
                limits=BuildLimits(still=timedelta(seconds=still_s)), report=report,
            )  # fmt: skip
        # Another build may have made a newer image under this name.
        catalogue.make_current(image)
    give_to_sudo_user(settings.cache_dir)
    print_image(image, as_json=as_json)


def _build(
    plan: BuildPlan,
    settings: Config,
    catalogue: ImageCatalogue,
    *,
    name: str,
    recipe: str,
    memory_mib: int,
    vcpu_count: int,
    limits: BuildLimits,
    report: ProgressReport,
) -> Image:
    # One directory for all builds: the next one finds and ends the machine of one that was killed.
    directory = settings.cache_dir / "build"
    if pid := holder(directory):
        raise ConfigError(
            f"cache {settings.cache_dir}: process {pid} builds Windows in it; wait until it ends, or choose another "
            "--cache-dir"
        )

    async def build(media: DiskImage) -> Image:
        # QEMU also reads the ISO, which the boot disc is an overlay of.
        iso = ExtraDrive(path=plan.options.iso, disk_format="raw", is_cdrom=True)
        hypervisor = await LibvirtHypervisor.open(
            # The driver and templates of the operator's daemon are not for builds.
            settings.hypervisor.model_copy(update={"uri": "", "template_dir": None, "template_memory_dir": None}),
            state_dir=directory,
            cache_dir=settings.cache_dir,
            images=[replace(media, drives=(*media.drives, iso))],
        )
        if hypervisor.accelerator is Accelerator.TCG:
            err.print("without KVM, Windows takes many hours to install; `envd doctor` shows why there is none")
        try:
            await hypervisor.reap()
            return await build_windows(
                plan, hypervisor, catalogue, media, name=name, recipe=recipe, reports=directory / "reports" / name,
                limits=limits, memory_mib=memory_mib, vcpu_count=vcpu_count, progress=report,
            )  # fmt: skip
        finally:
            await hypervisor.close()

    with locked(directory), catalogue.staging(name) as scratch:
        report("writing the discs", 0.0)
        return asyncio.run(build(write_media(plan, scratch)))


def _dry_run(plan: BuildPlan, directory: Path, *, memory_mib: int, vcpu_count: int) -> DiskImage:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ConfigError(f"--dry-run {directory}: not empty; name a new directory")
    media = write_media(plan, directory.resolve())
    files = QemuFiles(directory=directory.resolve() / "machine")
    spec = MachineSpec(
        machine_id="install",
        image=media,
        memory_mib=memory_mib,
        vcpu_count=vcpu_count,
        screen_width_px=plan.options.screen_width_px,
        screen_height_px=plan.options.screen_height_px,
    )
    xml = etree.fromstring(
        domain_xml(
            spec,
            owner="dry-run",
            files=files,
            accelerator=Accelerator.KVM,
            memory_path=files.directory / "memory",
            generation=uuid4(),
            firmware=find_firmware(),
        )
    )
    (directory / _DOMAIN).write_bytes(etree.tostring(xml, pretty_print=True))
    return media


def _print_media(plan: BuildPlan, directory: Path, media: DiskImage, *, as_json: bool) -> None:
    if as_json:
        boot_disc, answer_disc = (drive.path for drive in media.drives)
        answers = media.disk.with_name(ANSWER_FILE)
        files = {"answers": answers, "boot_disc": boot_disc, "answer_disc": answer_disc, "domain": directory / _DOMAIN}
        emit_json({"edition": plan.edition.name, **{name: str(file) for name, file in files.items()}})
        return
    out.print(f"{plan.edition.name}: wrote to {directory}, and started nothing:", markup=False, soft_wrap=True)
    for file in sorted(directory.iterdir()):
        out.print(f"  {file.name}", markup=False)
    err.print(f"the answer file and disc hold the password of the account {USER}", markup=False, soft_wrap=True)


def _medium(
    file: Path | None, wanted: MediaDownload | None, option: str, settings: Config, report: ProgressReport
) -> Path:
    if file is not None:
        return file
    if wanted is None:
        raise ConfigError(f"{option}: missing; name the file, or --download a release")
    return asyncio.run(download(wanted, settings.cache_dir / "downloads", progress=report))


def _key(source: str) -> str:
    """Return a product key from where it is. A key on the command line would be visible to other users."""
    kind, _, place = source.partition(":")
    if source in {"", "none"}:
        return source
    try:
        if kind == "env":
            return os.environ[place].strip()
        if kind == "file":
            return Path(place).read_text().strip()
    except (KeyError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key {source}: cannot be read; set the variable or check the path") from error
    raise ConfigError("--key: expected env:NAME, file:PATH or none, never the key itself")
