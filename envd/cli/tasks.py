"""The commands of `envd tasks`, for the tasks that a daemon with this configuration serves."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from cuaenv.cli.lazy import lazy_group
from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, out
from envd.base.config import Config
from envd.base.config_values import BUILTIN_TASKS
from envd.cli.command import command
from envd.cli.options import config_options
from envd.cli.remote import CALL_TIMEOUT, RemoteDaemon, TlsCa, TlsCert, TlsKey
from envd.cli.tasks_fetch import fetch_all, print_fetched
from envd.cli.tasks_oracles import oracles
from envd.cli.terminal import columns, printable
from envd.daemon.suites import inspect_tasks, load_tasks, optional_suites, with_suites
from envd.hypervisor.backends import backend_of
from envd.images.catalogue import Image, ImageCatalogue
from envd.images.recipe import OFFICE_APPLICATIONS
from envd.tasks.assets import AssetCache, AssetMissing
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.formats.entries import Problem
from envd.tasks.model import Task, missing_needs, split_by_needs
from envd.tasks.systems import task_systems
from envd.tasks.templates import split_of, template_id_of

# Playing tasks starts a daemon, which is slow to import.
_PLAYING = {
    "record": (
        "envd.cli.tasks_record:record",
        "Show a task once, in the console or by a script, and write it with setup, oracle and checkers.",
    ),
    "verify": (
        "envd.cli.tasks_verify:verify_command",
        "Play the oracle of each task, which must score 1, and do nothing, which must score 0, on forks of one state.",
    ),
    "attack": (
        "envd.cli.tasks_attack:attack_command",
        "Play almost right solutions and cheats of each task, which a sound checker scores below 1, on forks.",
    ),
    "parity": (
        "envd.cli.tasks_parity:parity_command",
        "Play the same scripts on two kinds of desktops, and compare scores and screens task by task.",
    ),
}

app = typer.Typer(cls=lazy_group(_PLAYING), no_args_is_help=True, help="Inspect the tasks that clients can request.")
app.command("oracles")(oracles)


@app.command("list")
@command(config_options("tasks", "hypervisor"))
def list_(
    settings: Config,
    *,
    envd: Annotated[
        str, typer.Option("--envd", metavar="HOST:PORT", help="List the tasks that this running daemon serves.")
    ] = "",
    suite: Annotated[
        str, typer.Option(metavar="SUITE", help="Only the tasks of this suite; loads `windows` if it is named.")
    ] = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """List the tasks of the built-in suite and of the configuration, or of a running daemon.

    Of a template the plain variant is listed, with how many there are: TASK?seed=N is another. A terminal shows
    the beginning of each instruction.
    """
    if envd:
        daemon = RemoteDaemon(envd=envd, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        served = daemon.call(lambda client: client.list_tasks(timeout=CALL_TIMEOUT))
        # The fields of `_summary` that a daemon reports.
        names = ("task_id", "level", "domain", "split", "variant_count", "instruction", "max_steps", "runnable")
        summaries = [
            {name: getattr(task, name) for name in names}
            for task in served
            if suite in {"", task.task_id.partition("/")[0]}
        ]
    else:
        catalogue = load_tasks(with_suites(settings, [suite]))
        chosen = catalogue.select([f"{suite}/"]) if suite else catalogue.list()
        summaries = [_summary(task, catalogue) for task in chosen]
    if as_json:
        emit_json({"tasks": summaries})
        return
    rows: Iterable[Sequence[str | Text]] = (
        (
            *(str(task[key]) for key in ("task_id", "level", "split", "variant_count")),
            Text(printable(" ".join(str(task["instruction"]).split())), no_wrap=True, overflow="ellipsis"),
        )
        for task in summaries
    )
    table = columns(("task", "level", "split", "variants", "instruction"), rows, whole=("level", "split", "variants"))
    table.columns[0].overflow = "fold"  # Ids are copied, so none is shortened.
    table.columns[-1].min_width = 16
    out.print(table)


@app.command("suites")
@command(config_options("tasks", "hypervisor"))
def suites(settings: Config, *, as_json: Json = False) -> None:
    """List the suites: those of the configuration, and the built-in ones that are loaded on request."""
    served = {_suite_of(task) for task in load_tasks(settings).list()}
    by_suite: dict[str, list[Task]] = {}
    runs_guests = backend_of(settings.hypervisor.uri).capabilities.runs_guests
    for task in load_tasks(with_suites(settings, [*optional_suites()] if runs_guests else [])).list():
        by_suite.setdefault(_suite_of(task), []).append(task)
    found = [
        {
            "suite": name,
            "tasks": len(tasks),
            "held_out": sum(split_of(task) == "held_out" for task in tasks),
            "os": ", ".join(sorted({task.os.value for task in tasks})),
            "served": name in served,
        }
        for name, tasks in sorted(by_suite.items())
    ]
    if as_json:
        emit_json({"suites": found})
        return
    rows = (
        (
            *(str(each[key]) for key in ("suite", "tasks", "held_out", "os")),
            "" if each["served"] else f"on request: --tasks {BUILTIN_TASKS}{each['suite']}",
        )
        for each in found
    )
    out.print(columns(("suite", "tasks", "held out", "os", ""), rows))


@app.command("show")
@command(config_options("tasks", "hypervisor"))
def show(
    settings: Config,
    *,
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="A task's id, SUITE/NAME or SUITE/NAME?seed=N.")],
    as_json: Json = False,
) -> None:
    """Show one task: its instruction, setup and checker."""
    catalogue = load_tasks(with_suites(settings, [task_id]))
    task = catalogue.get(task_id)
    if as_json:
        # pydantic cannot serialise the actions of oracles; the summary has their number.
        emit_json({**_summary(task, catalogue), **task.model_dump(mode="json", exclude={"oracle"}, exclude_none=True)})
        return
    for key, value in _summary(task, catalogue).items():
        out.print(f"{key:<18} {'unknown' if value is None else value}", markup=False, soft_wrap=True)
    for obstacle in catalogue.obstacles(task) or ():
        out.print(f"{'obstacle':<18} {obstacle}", markup=False, soft_wrap=True)
    for verb in task.setup:
        fields = verb.model_dump_json(exclude={"kind"}, exclude_defaults=True, by_alias=True)
        out.print(f"{'setup':<18} {verb.kind}: {fields}", markup=False, soft_wrap=True)
    if task.checker is not None:
        fields = task.checker.model_dump_json(exclude_defaults=True, by_alias=True)
        out.print(f"{'checker':<18} {fields}", markup=False, soft_wrap=True)


@app.command("lint")
@command(config_options("tasks", "cache_dir", "hypervisor"))
def lint(settings: Config, *, as_json: Json = False) -> None:
    """Validate all tasks without booting anything; report the location, field and cause of every problem."""
    found = list(inspect_tasks(settings))
    checked = [each for each in found if isinstance(each, Task)]
    problems = [each for each in found if isinstance(each, Problem)]
    problems += missing_assets(checked, AssetCache(settings.asset_dir))
    images = ImageCatalogue(settings.cache_dir).list()
    problems += unmet_needs(checked, images)
    runnable = images_that_run([task for task in checked if task.needs], images)
    count = len(checked)
    if as_json:
        by_image = {name: [task.task_id for task in tasks] for name, tasks in runnable.items()}
        emit_json({"tasks": count, "runnable": by_image, "problems": [asdict(problem) for problem in problems]})
    elif problems:
        rows = ((each.where, each.task_id, each.field, Text(each.message)) for each in problems)
        out.print(columns(("where", "task", "field", "problem"), rows))
    if not as_json:
        for name, tasks in runnable.items():
            out.print(f"image {name} has what {len(tasks)} tasks need", markup=False)
        suites = ", ".join(sorted({*map(_suite_of, checked)}))
        out.print(f"{count} tasks of {suites or 'no suite'}; problems: {len(problems)}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(EXIT_FAILED)


@app.command("fetch")
@command(config_options("tasks", "cache_dir", "hypervisor"))
def fetch(
    settings: Config,
    *,
    task_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help="Task ids, or SUITE/ for a whole suite. Default: all."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also files that are already cached.")] = False,
    as_json: Json = False,
) -> None:
    """Download the files that tasks need into the cache, so that episodes need no network."""
    catalogue = load_tasks(with_suites(settings, task_ids or []))
    wanted = catalogue.select(task_ids) if task_ids else catalogue.list()
    refs = sorted({ref for task in wanted for ref in task.downloads()})
    failures = asyncio.run(fetch_all(refs, AssetCache(settings.asset_dir), again=again))
    print_fetched(refs, failures, as_json=as_json)
    if failures:
        raise typer.Exit(EXIT_FAILED)


def missing_assets(tasks: Iterable[Task], cache: AssetCache) -> Iterator[Problem]:
    """Yield a problem for every file that a task needs and the cache lacks."""
    for task in tasks:
        for ref in task.downloads():
            try:
                cache.find(ref)
            except AssetMissing as error:
                yield Problem(where=str(cache.directory), task_id=task.task_id, message=str(error))


def unmet_needs(tasks: Iterable[Task], images: Sequence[Image]) -> Iterator[Problem]:
    """Yield a problem for every task of a foreign suite that needs what no image of this host provides."""
    provided = frozenset(name for image in images for name in image.provides)
    for task in tasks:
        suite = _suite_of(task)
        if suite not in {system.suite for system in task_systems() if system.suite} or not (
            lacking := missing_needs(task, provided)
        ):
            continue
        # An image that is not built yet provides as much as one that has nothing.
        buildable = not missing_needs(task, provided | frozenset(OFFICE_APPLICATIONS))
        remedy = "build it with `envd image build office`" if buildable else "resets refuse it"
        message = f"cannot run: it needs {lacking}, and no image here provides that; {remedy}"
        yield Problem(where=suite, task_id=task.task_id, message=message)


def images_that_run(tasks: Sequence[Task], images: Sequence[Image]) -> dict[str, list[Task]]:
    """Return the tasks that each image provides everything for, by its name; an image without any is left out."""
    by_name = {image.name: split_by_needs(tasks, frozenset(image.provides))[0] for image in images}
    return {name: runnable for name, runnable in by_name.items() if runnable}


def _suite_of(task: Task) -> str:
    return task.task_id.partition("/")[0]


def _summary(task: Task, catalogue: TaskCatalogue) -> dict[str, object]:
    """Return the fields for people and scripts; `runnable` is None if unknown."""
    obstacles = catalogue.obstacles(task)
    return {
        "task_id": task.task_id,
        "level": task.level,
        "domain": task.domain,
        "split": split_of(task),
        "variant_count": catalogue.variant_count(template_id_of(task.task_id)),
        "instruction": task.instruction.strip(),
        "max_steps": task.max_steps,
        "infeasible": task.infeasible,
        "runnable": None if obstacles is None else not obstacles,
        "oracle_step_count": len(task.oracle),
    }
