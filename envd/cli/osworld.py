"""`envd osworld`: install OSWorld, and list which of its tasks can run on this host."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit_json, err, out, progress
from envd.base.config import Config
from envd.base.errors import OsworldError
from envd.cli.command import command
from envd.cli.options import config_options
from envd.cli.terminal import columns, stop_on_sigterm
from envd.integrations.osworld.environment import PACKAGE, Environment, examples_of
from envd.integrations.osworld.files import OsworldFile, read_files
from envd.integrations.osworld.host import host_of
from envd.integrations.osworld.lint import FoundObstacle, Obstacle, findings, texts_of
from envd.integrations.osworld.workers import KnownNames, OsworldWorkers

app = typer.Typer(no_args_is_help=True, help="OSWorld's tasks, with its own setup and evaluators.")


@app.command("install")
@command(config_options("cache_dir"))
def install(
    settings: Config,
    *,
    tasks: Annotated[
        str, typer.Option(metavar="DIR|URL", help="Task files: a checkout of OSWorld, or a URL to clone.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Install OSWorld's package into a separate virtual environment, and register its task files."""
    stop_on_sigterm()
    environment = Environment(settings.cache_dir)
    if tasks:
        examples_of(tasks)  # before minutes of downloads
    with progress(f"osworld {PACKAGE}") as report:
        environment.install(progress=report)
    if tasks:
        with progress("osworld tasks") as report:
            environment.register_tasks(tasks, progress=report)
    found = environment.tasks
    if as_json:
        emit_json({"python": str(environment.python), "package": PACKAGE, "tasks": str(found or "")})
        return
    out.print(f"{PACKAGE} is in {environment.directory}", markup=False, soft_wrap=True)
    if found is None:
        err.print("no task files are registered; run `envd osworld install --tasks DIR`", soft_wrap=True)
    else:
        files, problems = read_files(found)
        out.print(f"{len(files)} tasks are in {found}", markup=False, soft_wrap=True)
        for problem in problems:
            err.print(str(problem), markup=False, soft_wrap=True)


@app.command("lint")
@command(config_options("cache_dir"))
def lint(
    settings: Config,
    *,
    domain: Annotated[str, typer.Option(help="Only tasks of this domain, such as vs_code.")] = "",
    as_json: Json = False,
) -> None:
    """List which tasks can run on this host, and why others cannot. Starts no machine."""
    files, found = examine(settings)
    files = [file for file in files if not domain or file.domain == domain]
    runnable = sum(not found[file.task_id] for file in files)
    if as_json:
        emit_json(
            {
                "tasks": [_row(file, found[file.task_id]) for file in files],
                "total": len(files),
                "runnable": runnable,
                "obstacles": dict(_obstacles(files, found)),
            }
        )
        return
    rows = (
        (file.task_id, file.domain, "no" if found[file.task_id] else "yes", "; ".join(texts_of(found[file.task_id])))
        for file in files
    )
    out.print(columns(("task", "domain", "can run", "why not"), rows))
    totals = Counter(f"{file.suite} {file.domain}" for file in files)
    able = Counter(f"{file.suite} {file.domain}" for file in files if not found[file.task_id])
    for name in sorted(totals):
        out.print(f"{name}: {able[name]} of {totals[name]} can run", markup=False)
    out.print(f"{runnable} of {len(files)} can run")


def examine(config: Config) -> tuple[list[OsworldFile], Mapping[str, tuple[FoundObstacle, ...]]]:
    """Return the registered task files and, by task id, the reasons why each cannot run.

    Raises:
        OsworldError: No task files are registered, or the installed package cannot be imported.
    """
    environment = Environment(config.cache_dir)
    if environment.tasks is None:
        raise OsworldError("no task files are registered; run `envd osworld install --tasks DIR`")
    files, problems = read_files(environment.tasks)
    for problem in problems:
        err.print(str(problem), markup=False, soft_wrap=True)
    known = environment.known_names()
    if known is None and environment.is_installed:
        known = asyncio.run(_known_names(environment))
    host = host_of(config, known=known)
    return files, {file.task_id: findings(file, host) for file in files}


async def _known_names(environment: Environment) -> KnownNames:
    workers = OsworldWorkers(environment.python)
    try:
        return await workers.start()
    finally:
        await workers.aclose()


def _row(file: OsworldFile, found: Sequence[FoundObstacle]) -> dict[str, object]:
    return {
        "task_id": file.task_id,
        "domain": file.domain,
        "os": file.os.value,
        "infeasible": file.is_infeasible,
        "can_run": not found,
        "obstacles": [{"kind": obstacle.value, "what": detail} for obstacle, detail in found],
    }


def _obstacles(files: Sequence[OsworldFile], found: Mapping[str, Sequence[FoundObstacle]]) -> Counter[str]:
    """Count the tasks with each kind of obstacle."""
    kinds = Counter({obstacle.value: 0 for obstacle in Obstacle})
    for file in files:
        kinds.update({obstacle.value for obstacle, _ in found[file.task_id]})
    return kinds
