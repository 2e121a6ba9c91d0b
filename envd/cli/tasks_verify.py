"""The command `envd tasks verify`."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, err
from envd.authoring.attack.mutants import attack_digest
from envd.authoring.attack.report import read_passed
from envd.authoring.verification import VerifyingPolicy, verify, verify_config
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.own_daemon import ensure_image, own_daemon_options, run_until_signal
from envd.cli.terminal import print_result
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.backends import backend_of
from envd.hypervisor.machine import GuestOs
from envd.images.catalogue import ImageCatalogue
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.formats.entries import Problem
from envd.tasks.model import Task, split_by_needs

TaskIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TASK]...", help="Task ids, or SUITE/ for a whole suite. Default: all with an oracle."),
]
Suites = Annotated[
    list[str] | None,
    typer.Option("--suite", metavar="SUITE", help="The same as SUITE/; loads a built-in suite if needed; repeatable."),
]


@command(own_daemon_options("tasks"))
def verify_command(
    settings: Config,
    *,
    task_ids: TaskIds = None,
    suites: Suites = None,
    starts: Annotated[
        bool, typer.Option("--starts", help="Only do nothing; also in tasks without an oracle, OSWorld's included.")
    ] = False,
    image: Annotated[
        str, typer.Option(help="Image to play on.", show_default="the tasks' own; for Windows the only Windows image")
    ] = "",
    parallel_count: Annotated[int, typer.Option("--parallel", min=1, max=256, help="Tasks played at once.")] = 2,
    as_json: Json = False,
) -> None:
    """Play the oracle of each task, which must score 1, and do nothing, which must score 0, on forks of one state."""
    wanted = names_of(task_ids, suites)
    settings = with_suites(settings, wanted)
    # OSWorld's tasks have no oracles.
    catalogue = load_tasks(settings, include_osworld=starts)
    chosen = choose(catalogue, wanted, starts=starts)
    if not wanted and not starts and (rest := len(catalogue) - len(chosen)):
        err.print(f"{rest} tasks have no oracle and are skipped; they fail if named")
    image, chosen, unmet = on_image(settings, chosen, image)
    if not chosen:
        raise ConfigError("tasks verify: no task can run on this image; choose another with --image")
    own = verify_config(settings, parallel_count=parallel_count, image=image)
    policies = (VerifyingPolicy.NULL,) if starts else tuple(VerifyingPolicy)
    verification = run_until_signal(verify(own, chosen, parallel_count=parallel_count, policies=policies))
    skipped = tuple(task.task_id for task in unmet)
    runs_guests = backend_of(settings.hypervisor.uri).capabilities.runs_guests
    stale = () if starts else not_attacked(chosen, runs_guests=runs_guests)
    left_out = tuple(map(str, left_out_of(catalogue, wanted)))
    print_result(replace(verification, skipped=skipped, not_attacked=stale, left_out=left_out), as_json=as_json)


def names_of(task_ids: Sequence[str] | None, suites: Sequence[str] | None) -> list[str]:
    """Return the named tasks, and `SUITE/` for each named suite."""
    return [*(task_ids or []), *(f"{name.removesuffix('/')}/" for name in suites or [])]


def left_out_of(catalogue: TaskCatalogue, wanted: Sequence[str]) -> list[Problem]:
    """Return the problems of wanted tasks, and of entries without an id, which could be wanted; all by default."""
    suites = tuple(name for name in wanted if name.endswith("/"))
    return [
        problem
        for problem in catalogue.problems
        if not wanted or not problem.task_id or problem.task_id in wanted or problem.task_id.startswith(suites)
    ]


def on_image(settings: Config, tasks: Sequence[Task], image: str) -> tuple[str, list[Task], list[Task]]:
    """Return the image that tasks are played on, those that it can run, and the others, which are reported.

    Builds the default image if it is missing.

    Raises:
        ImageNotFound, ImageError: It is missing or damaged, or cannot be built.
    """
    images = ImageCatalogue(settings.cache_dir)
    image = image or image_of(tasks, images)
    if not image:
        ensure_image(settings)
    runnable, unmet = split_by_needs(tasks, frozenset(images.get(image).provides) if image else frozenset())
    for task in unmet:
        err.print(f"{task.task_id} needs {', '.join(task.needs)}, which the image does not provide: skipped")
    return image, runnable, unmet


def not_attacked(tasks: Sequence[Task], *, runs_guests: bool) -> tuple[str, ...]:
    """Return the tasks of suites that passed an attack once and that changed since, or were added."""
    passed = read_passed(files("envd.authoring.attack") / "passed.yaml")
    suites = {task_id.partition("/")[0] for task_id in passed}
    held = (task for task in tasks if task.checker and task.task_id.partition("/")[0] in suites)
    return tuple(
        task.task_id
        for task in held
        # The record has plain variants only.
        if "?" not in task.task_id and passed.get(task.task_id) != attack_digest(task, runs_guests=runs_guests)
    )


def image_of(tasks: Sequence[Task], images: ImageCatalogue) -> str:
    """Return the image that tasks need; empty for the default one.

    Raises:
        ConfigError: They need several, or there is not exactly one image with their operating system.
    """
    needed = sorted({(task.image, task.os) for task in tasks})
    if len(needed) > 1:
        named = ", ".join(image or f"the default one for {os.value}" for image, os in needed)
        raise ConfigError(f"tasks verify: the tasks need several images ({named}); name tasks of one image")
    if not needed or needed[0] == ("", GuestOs.LINUX):
        return ""
    [(name, os)] = needed
    found = sorted({image.name for image in images.list() if image.os == os.value})
    if not name and len(found) != 1:
        listed = f"are several ({', '.join(found)})" if found else "is none"
        raise ConfigError(f"tasks verify: the tasks need an image with {os.value}, and there {listed}; use --image")
    return name or found[0]


def choose(catalogue: TaskCatalogue, wanted: Sequence[str], *, starts: bool = False) -> list[Task]:
    """Return the tasks that `TaskCatalogue.select` finds; by default, all with an oracle.

    With `starts`, the default is all feasible tasks that can run here.

    Raises:
        TaskNotFound: A name matches no task and no suite.
    """
    if not wanted and starts:
        return [task for task in catalogue.list() if task.checker and not catalogue.obstacles(task)]
    if not wanted:
        return [task for task in catalogue.list() if task.oracle]
    return list(catalogue.select(wanted))
