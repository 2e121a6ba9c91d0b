"""The commands of `envd suite`: what the scores of a suite depend on, kept in a file and compared with it later."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, out
from envd.base.config import DEFAULT_IMAGE, Config, PoolConfig
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.options import config_options
from envd.cli.tasks_verify import image_of
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.backends import backend_of
from envd.images.catalogue import ImageCatalogue
from envd.tasks import basis
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task

_FORMAT = 2
#: Variants of a template that a lock covers. The others come from the same code.
_VARIANTS = 10
_MOST_LISTED = 20
#: (width, height) of drawn desktops.
_DRAWN_SCREEN = (1280, 800)

app = typer.Typer(no_args_is_help=True, help="Record what the scores of a suite depend on, and find changes.")

Suite = Annotated[str, typer.Argument(metavar="SUITE", help="A suite that `envd tasks list` shows.")]
LockFile = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="The lock file; default: SUITE.lock in this directory.")
]
ImageName = Annotated[str, typer.Option("--image", metavar="NAME", help="The image to play it on; default: its own.")]


@app.command("lock")
@command(config_options("tasks", "cache_dir", "hypervisor"))
def lock(
    settings: Config, *, suite: Suite, file: LockFile = None, image: ImageName = "", as_json: Json = False
) -> None:
    """Write down what the scores of a suite depend on: tasks, checkers, image, packages, screen and settle settings."""
    found = _describe(settings, suite, image)
    path = file or Path(f"{suite}.lock")
    try:
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"lock file {path} cannot be written: {error.strerror}") from error
    if as_json:
        emit_json({"file": str(path), "suite": suite, "digest": found["digest"], "tasks": len(found["tasks"])})
        return
    out.print(f"{path}: {len(found['tasks'])} tasks, digest {found['digest']}", markup=False, soft_wrap=True)


@app.command("check")
@command(config_options("tasks", "cache_dir", "hypervisor"))
def check(
    settings: Config,
    *,
    suite: Suite,
    file: LockFile = None,
    image: ImageName = "",
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="FILE", help="Compare the scores of `trainer eval` in this file instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a suite, or results, with its lock file, and list what differs. The exit status is 1 if anything does."""
    path = file or Path(f"{suite}.lock")
    locked = _read(path)
    if results is not None:
        changes = _unlike(locked, suite, results)
    else:
        changes = _changes(locked, _describe(settings, suite, image))
    if as_json:
        emit_json({"file": str(path), "suite": suite, "changes": changes})
    else:
        for change in changes[:_MOST_LISTED]:
            out.print(change, markup=False, soft_wrap=True)
        if len(changes) > _MOST_LISTED:
            out.print(f"and {len(changes) - _MOST_LISTED} more")
        out.print(f"{suite}: {f'{len(changes)} changes' if changes else 'unchanged'}", markup=False)
    if changes:
        raise typer.Exit(EXIT_FAILED)


def _describe(settings: Config, suite: str, image: str) -> dict[str, Any]:
    """Return what the scores of a suite depend on, by name."""
    catalogue = load_tasks(with_suites(settings, [suite]))
    tasks = catalogue.select([f"{suite}/"])
    parts, conditions = _machine_parts(settings, tasks, image)
    described = {
        "tasks": {
            task.task_id: _digest([basis.task_digest(each) for each in _variants(catalogue, task)]) for task in tasks
        },
        "code": basis.code_digest(),
        **parts,
    }
    scores = {
        each.task_id: basis.digest_under(each, conditions) for task in tasks for each in _variants(catalogue, task)
    }
    return {"format": _FORMAT, "suite": suite, "digest": _digest(described), "scores": scores, **described}


def _machine_parts(settings: Config, tasks: Sequence[Task], image: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the image, its packages, the screen and the settle settings of the pool that plays the tasks, and the
    conditions of `envd.tasks.basis`."""
    disk = backend_of(settings.hypervisor.uri).capabilities.stand_in_image
    screen = _DRAWN_SCREEN
    if disk is None:
        images = ImageCatalogue(settings.cache_dir)
        name = image or image_of(tasks, images) or DEFAULT_IMAGE
        disk, registered = images.disk_image(name), images.get(name)
        screen = (registered.screen_width_px, registered.screen_height_px)
    pools = (pool for key, pool in settings.pools.items() if disk.name in {pool.image, key})
    pool = next(pools, PoolConfig())
    width_px, height_px = pool.screen or screen
    parts = {
        "image": disk.digest,
        "packages": dict(line.split(maxsplit=1) for line in disk.packages.splitlines()),
        "screen": f"{width_px}x{height_px}",
        "settle": pool.settle.model_dump(mode="json"),
    }
    return parts, basis.conditions(disk, (width_px, height_px), pool.settle)


def _variants(catalogue: TaskCatalogue, task: Task) -> list[Task]:
    """Return a task, and its first variants if it has any."""
    count = _VARIANTS if catalogue.variant_count(task.task_id) > 1 else 0
    return [task, *(catalogue.get(f"{task.task_id}?seed={seed}") for seed in range(count))]


def _unlike(locked: dict[str, Any], suite: str, results: Path) -> list[str]:
    """Return the tasks of a file of results whose scores do not have the digest of the lock. Raises: ConfigError."""
    try:
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        scores = {line["task_id"]: line["basis_digest"] for line in lines if line.get("basis_digest")}
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"results {results} cannot be read: {error}; give a file of `trainer eval`") from error
    own = {task_id: digest for task_id, digest in scores.items() if task_id.startswith(f"{suite}/")}
    if not own:
        raise ConfigError(f"results {results} have no score of suite {suite}")
    return [
        f"scores {task_id}: {locked['scores'].get(task_id, 'not in the lock')} -> {digest}"
        for task_id, digest in own.items()
        if locked["scores"].get(task_id) != digest
    ]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Raises: ConfigError: It cannot be read, or is not a lock file of this version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"lock file {path}: {error.strerror}; `envd suite lock` writes it") from error
    except ValueError as error:
        raise ConfigError(
            f"lock file {path} is damaged: {error}; restore it, or write it with `envd suite lock`"
        ) from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ConfigError(f"lock file {path} is not of this version; write it again with `envd suite lock`")
    return found


def _changes(locked: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return each difference as a line."""
    changes = []
    for name, now in found.items():
        before = locked.get(name)
        if name in ("digest", "scores") or before == now:
            continue
        if not (isinstance(before, dict) and isinstance(now, dict)):
            changes.append(f"{name}: {before} -> {now}")
            continue
        changes += [
            f"{name} {key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
    return changes
