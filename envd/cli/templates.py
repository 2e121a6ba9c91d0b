"""`envd image templates`: lists and prunes the templates that pools fork machines from."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit_json, err, out
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.options import config_options
from envd.cli.terminal import columns
from envd.daemon.state_lock import locked
from envd.hypervisor.machine import Accelerator
from envd.hypervisor.oci.templates import SUBDIRECTORY, StoredContainerTemplate, prune_templates, stored_templates
from envd.hypervisor.qemu.snapshots.files import SnapshotManifest
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore

app = typer.Typer(no_args_is_help=True, help="List and prune the templates that machines are forked from.")

_GIB = 1 << 30
_Template = SnapshotManifest | StoredContainerTemplate


@app.command("list")
@command(config_options("state_dir"))
def list_(settings: Config, *, as_json: Json = False) -> None:
    """List the stored templates, the least recently used first."""
    # Listing must not create the directory.
    found: list[_Template] = []
    if settings.template_dir.exists():
        found = [*_store(settings).all(), *stored_templates(settings.template_dir / SUBDIRECTORY)]
    templates = sorted(found, key=lambda template: template.use_time_s)
    if as_json:
        emit_json({"directory": str(settings.template_dir), "templates": [_fields(t) for t in templates]})
        return
    if not templates:
        err.print(f"no templates in {settings.template_dir}; the first pool of an image creates one", soft_wrap=True)
        return
    rows = map(_row, templates)
    out.print(columns(("key", "image", "memory", "vcpus", "screen", "accel", "size", "last used"), rows))


@app.command("prune")
@command(config_options("state_dir"))
def prune(
    settings: Config,
    *,
    limit_gib: Annotated[
        float | None,
        typer.Option(
            "--limit-gib", min=0, help="Disk space to keep, in GiB.", show_default="hypervisor.template_limit_gib"
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all templates.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the least recently used templates of virtual machines, and of containers, until the rest of each fits.

    Requires that no daemon uses this state.
    """
    if everything and limit_gib is not None:
        raise ConfigError("--all and --limit-gib exclude each other; use one of them")
    if everything:
        limit_bytes = 0
    else:
        limit_bytes = settings.hypervisor.template_limit_bytes if limit_gib is None else round(limit_gib * _GIB)
    removed: list[_Template] = []
    if settings.template_dir.exists():
        with locked(settings.state_dir):
            store = _store(settings)
            before = {template.key: template for template in store.all()}
            removed += [before[key] for key in store.prune(limit_bytes=limit_bytes)]
            containers = settings.template_dir / SUBDIRECTORY
            removed += asyncio.run(prune_templates(containers, limit_bytes=limit_bytes))
    freed_bytes = sum(template.size_bytes for template in removed)
    if as_json:
        emit_json({"removed": [_fields(template) for template in removed], "freed_bytes": freed_bytes})
    else:
        names = ", ".join(f"{each['key']} ({each['image']})" for each in map(_fields, removed)) or "none"
        out.print(f"removed {names}, {freed_bytes / (1 << 20):.0f} MiB", soft_wrap=True)


def _store(settings: Config) -> QemuTemplateStore:
    return QemuTemplateStore(settings.template_dir, limit_bytes=settings.hypervisor.template_limit_bytes)


def _row(template: _Template) -> tuple[str, ...]:
    size, last_use = f"{template.size_bytes / (1 << 20):.0f} MiB", _time(template.use_time_s).replace("T", " ")[:16]
    if isinstance(template, StoredContainerTemplate):
        image = f"{template.image}@{template.image_directory[:8]}"
        # Its machines' memory, processors and screen are only part of its key.
        return (template.key, image, "", "", "", Accelerator.NATIVE.value, size, last_use)
    return (
        template.key,
        f"{template.image}@{template.image_digest[:8]}",
        f"{template.memory_mib} MiB",
        str(template.vcpu_count),
        template.screen,
        template.accelerator,
        size,
        last_use,
    )


def _fields(template: _Template) -> dict[str, object]:
    if isinstance(template, StoredContainerTemplate):
        fields = template.model_dump(exclude={"digest", "notes", "format"}) | {"accelerator": Accelerator.NATIVE.value}
    else:
        fields = template.model_dump(exclude={"notes", "format"})
    return {**fields, "size_bytes": template.size_bytes, "last_use_time": _time(template.use_time_s)}


def _time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
