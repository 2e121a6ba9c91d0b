"""The commands of `envd tasks`, about the tasks that a daemon with this configuration serves."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from envd.cli.options import Accelerator, CacheDir, ConfigFile, Hypervisor, Json, StateDir, TaskFiles, load_config
from envd.cli.output import EXIT_FAILED, emit_json, err, friendly, out
from envd.cli.private import ensure_image, run_to_end
from envd.cli.suites import load_tasks, look_at_tasks
from envd.cli.tasks.fetch import fetch_all, tell_fetched
from envd.cli.tasks.oracles import oracles
from envd.cli.tasks.verify import tell, verify, verify_config
from envd.tasks.assets import AssetCache, AssetMissing, assets_of
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.formats.entries import Problem
from envd.tasks.model import Task
from envd.tasks.templates import split_of, template_id_of
from envd.telemetry import logs

app = typer.Typer(no_args_is_help=True, help="Look at the tasks that clients may ask for.")
app.command("oracles")(oracles)


@app.command("list")
@friendly
def list_(
    *, tasks: TaskFiles = None, config: ConfigFile = None, hypervisor: Hypervisor = None, as_json: Json = False
) -> None:
    """List the tasks: the built-in suite and those that the configuration adds.

    Of a template the plain variant is listed, with how many there are: TASK?seed=N is another.
    """
    catalogue = load_tasks(load_config(config, hypervisor=hypervisor, tasks=tasks))
    found = catalogue.list()
    if as_json:
        emit_json({"tasks": [_summary(task, catalogue) for task in found]})
        return
    table = Table("task", "level", "split", "variants", "instruction", box=None, pad_edge=False)
    for task in found:
        count = catalogue.variant_count(task.task_id)
        table.add_row(task.task_id, str(task.level), split_of(task), str(count), task.instruction.strip())
    out.print(table, markup=False)


@app.command("show")
@friendly
def show(
    *,
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="A task's id, SUITE/NAME or SUITE/NAME?seed=N.")],
    tasks: TaskFiles = None,
    config: ConfigFile = None,
    hypervisor: Hypervisor = None,
    as_json: Json = False,
) -> None:
    """Show one task: what it asks, how it is set up and how it is scored."""
    catalogue = load_tasks(load_config(config, hypervisor=hypervisor, tasks=tasks))
    task = catalogue.get(task_id)
    if as_json:
        # Oracles are made of plain dataclasses that pydantic does not model; they are shown by their length.
        emit_json({**_summary(task, catalogue), **task.model_dump(mode="json", exclude={"oracle"}, exclude_none=True)})
        return
    for key, value in _summary(task, catalogue).items():
        out.print(f"{key:<16} {value}", markup=False, soft_wrap=True)
    for verb in task.setup:
        out.print(
            f"{'setup':<16} {verb.kind}: {verb.model_dump_json(exclude={'kind'}, exclude_defaults=True)}", markup=False
        )
    if task.checker is not None:
        out.print(f"{'checker':<16} {task.checker.model_dump_json(exclude_defaults=True)}", markup=False)


@app.command("lint")
@friendly
def lint(
    *,
    tasks: TaskFiles = None,
    cache_dir: CacheDir = None,
    config: ConfigFile = None,
    hypervisor: Hypervisor = None,
    as_json: Json = False,
) -> None:
    """Check every task without booting anything, and tell of all that is wrong: where, in which field, and why."""
    settings = load_config(config, cache_dir=cache_dir, hypervisor=hypervisor, tasks=tasks)
    found = list(look_at_tasks(settings))
    checked = [each for each in found if isinstance(each, Task)]
    problems = [each for each in found if isinstance(each, Problem)]
    problems += missing_assets(checked, AssetCache(settings.asset_dir))
    count = len(checked)
    if as_json:
        emit_json({"tasks": count, "problems": [asdict(problem) for problem in problems]})
    elif problems:
        table = Table("where", "task", "field", "what is wrong", box=None, pad_edge=False)
        for problem in problems:
            table.add_row(*map(escape, (problem.where, problem.task_id, problem.field, problem.message)))
        out.print(table)
    if not as_json:
        out.print(f"{count} tasks, {len(problems)} problems", markup=False)
    if problems:
        raise typer.Exit(EXIT_FAILED)


@app.command("fetch")
@friendly
def fetch(
    *,
    tasks: TaskFiles = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is there already.")] = False,
    cache_dir: CacheDir = None,
    config: ConfigFile = None,
    hypervisor: Hypervisor = None,
    as_json: Json = False,
) -> None:
    """Download the files that tasks need into the cache, so that episodes need no network."""
    settings = load_config(config, cache_dir=cache_dir, hypervisor=hypervisor, tasks=tasks)
    refs = sorted({ref for task in load_tasks(settings).list() for ref in assets_of(task)})
    failures = asyncio.run(fetch_all(refs, AssetCache(settings.asset_dir), again=again))
    tell_fetched(refs, failures, as_json=as_json)
    if failures:
        raise typer.Exit(EXIT_FAILED)


@app.command("verify")
@friendly
def verify_command(
    *,
    task_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help="Tasks' ids, or SUITE/ for a whole suite; all that have an oracle."),
    ] = None,
    parallel_count: Annotated[int, typer.Option("--parallel", min=1, max=256, help="Tasks played at once.")] = 2,
    tasks: TaskFiles = None,
    state_dir: StateDir = None,
    cache_dir: CacheDir = None,
    config: ConfigFile = None,
    hypervisor: Hypervisor = None,
    accelerator: Accelerator = None,
    as_json: Json = False,
) -> None:
    """Play each task's oracle, which must score 1, and do nothing in it, which must score 0, on forks of one state."""
    settings = load_config(
        config, state_dir=state_dir, cache_dir=cache_dir, hypervisor=hypervisor, accelerator=accelerator, tasks=tasks
    )
    logs.setup(log_format=settings.log_format, level="warning" if settings.log_level == "info" else settings.log_level)
    # OSWorld's come without oracles.
    catalogue = load_tasks(settings, include_osworld=False)
    chosen = choose(catalogue, task_ids or [])
    if not task_ids and (rest := len(catalogue) - len(chosen)):
        err.print(f"{rest} tasks have no oracle and are not played; name them, and they fail")
    ensure_image(settings)
    own = verify_config(settings, parallel_count=parallel_count)
    verification = run_to_end(verify(own, chosen, parallel_count=parallel_count))
    tell(verification, as_json=as_json)
    if verification.failures:
        raise typer.Exit(EXIT_FAILED)


def choose(catalogue: TaskCatalogue, wanted: Sequence[str]) -> list[Task]:
    """Return tasks by id, and whole suites by `SUITE/`; all that have an oracle where nothing is named.

    Raises:
        TaskNotFound: There is none of that name.
    """
    if not wanted:
        return [task for task in catalogue.list() if task.oracle]
    chosen: dict[str, Task] = {}
    for name in wanted:
        of_suite = [task for task in catalogue.list() if name.endswith("/") and task.task_id.startswith(name)]
        chosen |= {task.task_id: task for task in of_suite or [catalogue.get(name)]}
    return list(chosen.values())


def missing_assets(tasks: Iterable[Task], cache: AssetCache) -> Iterator[Problem]:
    """Yield a problem for every file that a task needs and the cache does not have."""
    for task in tasks:
        for ref in assets_of(task):
            try:
                cache.find(ref)
            except AssetMissing as error:
                yield Problem(where=str(cache.directory), task_id=task.task_id, message=str(error))


def _summary(task: Task, catalogue: TaskCatalogue) -> dict[str, object]:
    return {
        "task_id": task.task_id,
        "level": task.level,
        "domain": task.domain,
        "split": split_of(task),
        "variant_count": catalogue.variant_count(template_id_of(task.task_id)),
        "instruction": task.instruction.strip(),
        "max_steps": task.max_steps,
        "infeasible": task.infeasible,
        "oracle_step_count": len(task.oracle),
    }
