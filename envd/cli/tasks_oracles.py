"""`envd tasks oracles`: print the oracles of tasks, for clients that play them through the service."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cuaenv.actions import Done
from cuaenv.cli.terminal import err
from cuaenv.problems import problem_of, without_path
from envd.authoring.attack.mutants import Family, Mutant, ends
from envd.authoring.attack.playing import GUEST_TOOLS
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.options import config_options
from envd.daemon.suites import load_tasks
from envd.tasks.model import Task
from envd.tasks.oracle import OracleSteps, parse_action, split_step, without_target, write_action
from envd.tasks.templates import MAX_SEED, split_of


@command(config_options("tasks", "hypervisor"))
def oracles(
    settings: Config,
    *,
    task_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help="Task ids, or SUITE/ for a whole suite. Default: all."),
    ] = None,
    suite: Annotated[str, typer.Option(help="Only tasks of this suite.")] = "",
    seeds: Annotated[
        str, typer.Option(metavar="FIRST:END", help="Variants of each template with these seeds, without END.")
    ] = "",
) -> None:
    """Print the oracles as JSON lines, one per task: its id and its steps, each the actions of one `Step` call.

    Oracles solve every task, so they are for the host's operator only: the service never returns them.
    """
    catalogue = load_tasks(settings)
    wanted = read_seeds(seeds) if seeds else None
    count = 0
    for task in catalogue.select(task_ids) if task_ids else catalogue.list():
        if not task.oracle or (suite and not task.task_id.startswith(f"{suite}/")):
            continue
        if wanted is None or catalogue.variant_count(task.task_id) == 1:
            variants: Iterable[Task] = [task]
        else:
            variants = (catalogue.get(f"{task.task_id}?seed={seed}") for seed in wanted)
        for variant in variants:
            typer.echo(json.dumps(oracle_line(variant), ensure_ascii=False))
            count += 1
    if not count:
        suites = sorted({task.task_id.partition("/")[0] for task in catalogue.list() if task.oracle})
        if task_ids:
            raise ConfigError(f"task {task_ids[0]}: no oracle among the named tasks; remove a name, or --suite")
        raise ConfigError(f"--suite {suite}: no task of it has an oracle; choose one of {', '.join(suites) or 'none'}")
    err.print(f"{count} oracles")


def read_seeds(text: str) -> range:
    """Parse `FIRST:END`. Raises: ConfigError."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()) or not int(first) < int(end) <= MAX_SEED + 1:
        raise ConfigError(f"--seeds {text}: not a range of seeds; give FIRST:END, such as 0:100")
    return range(int(first), int(end))


def oracle_line(task: Task) -> dict[str, object]:
    """Return a task's line, without targets; coordinates are pixels of a 1280x800 screen."""
    parts = (split_step(step) for step in task.oracle)
    steps = [
        [write_action(each) for each in (*map(without_target, inputs), *conditions)] for inputs, conditions in parts
    ]
    return {"task_id": task.task_id, "version": task.version, "split": split_of(task), "steps": steps}


def read_oracles(path: Path) -> dict[str, Any]:
    """Return the steps of a file of such lines, by task id. Raises: ConfigError: It cannot be read."""
    return {row["task_id"]: row["steps"] for _, row in _rows(path)}


def read_mutants(path: Path, tasks: Iterable[Task]) -> dict[str, tuple[Mutant, ...]]:
    """Return the own mutants in a file of oracles, by task id. Raises: ConfigError.

    A line may have `mutants`, each with `name`, `family` and `steps`, which are played instead of the oracle or, with
    `after_oracle: true`, on the solved task before the end is declared.
    """
    oracles = {task.task_id: task.oracle for task in tasks}
    found: dict[str, tuple[Mutant, ...]] = {}
    for number, row in _rows(path):
        if row["task_id"] in oracles:
            try:
                own = [_mutant(each, oracles[row["task_id"]]) for each in row.get("mutants", ())]
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(f"oracles {path}, line {number}: mutants: {error}") from error
            found[row["task_id"]] = tuple(own)
    return found


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the lines of a file of oracles, and their numbers. Raises: ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"oracles {path} cannot be read: {without_path(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"oracles {path}, line {number}: is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("task_id"), str) or "steps" not in row:
            problem = "is not an object with task_id and steps; write it with `envd tasks oracles`"
            raise ConfigError(f"oracles {path}, line {number}: {problem}")
        yield number, row


def _mutant(fields: Mapping[str, Any], oracle: OracleSteps) -> Mutant:
    unknown = fields.keys() - {"name", "family", "steps", "after_oracle"}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: not a field of a mutant")
    if missing := {"name", "family", "steps"} - fields.keys():
        raise ValueError(f"{', '.join(sorted(missing))}: missing in a mutant")
    steps = tuple(tuple(map(parse_action, step)) for step in fields["steps"])
    solved = len(oracle) - ends(oracle) if fields.get("after_oracle") else 0
    return Mutant(
        name=f"own: {fields['name']}",
        family=Family(fields["family"]),
        shared_count=solved,
        steps=steps if ends(steps) else (*steps, (Done(),)),
    )


def with_oracle(task: Task, oracles: Mapping[str, Any]) -> Task:
    """Return a task with its steps in `oracles`, which may use tools; without any, unchanged. Raises: ConfigError."""
    steps = oracles.get(task.task_id)
    if steps is None:
        return task
    try:
        own = {"oracle": steps, "tools": sorted({*task.tools, *GUEST_TOOLS})}
        return Task.model_validate(task.model_dump(exclude={"oracle"}, by_alias=True) | own)
    except ValidationError as error:
        raise ConfigError(f"oracle of {task.task_id}: {problem_of(error.errors()[0])}") from error
