"""`envd tasks`: the tasks that a daemon with this configuration serves."""

from typing import Annotated

import typer
from rich.table import Table

from envd.cli.options import ConfigFile, Hypervisor, Json, load_config
from envd.cli.output import emit_json, friendly, out
from envd.cli.suites import load_tasks
from envd.tasks.model import Task

app = typer.Typer(no_args_is_help=True, help="Look at the tasks that clients may ask for.")


@app.command("list")
@friendly
def list_(*, config: ConfigFile = None, hypervisor: Hypervisor = None, as_json: Json = False) -> None:
    """List the tasks: the built-in suite and those that the configuration adds."""
    tasks = load_tasks(load_config(config, hypervisor=hypervisor)).list()
    if as_json:
        emit_json({"tasks": [_summary(task) for task in tasks]})
        return
    table = Table("task", "level", "instruction", box=None, pad_edge=False)
    for task in tasks:
        table.add_row(task.task_id, str(task.level), task.instruction.strip())
    out.print(table, markup=False)


@app.command("show")
@friendly
def show(
    *,
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="A task's id, SUITE/NAME.")],
    config: ConfigFile = None,
    hypervisor: Hypervisor = None,
    as_json: Json = False,
) -> None:
    """Show one task: what it asks, how it is set up and how it is scored."""
    task = load_tasks(load_config(config, hypervisor=hypervisor)).get(task_id)
    if as_json:
        # Oracles are made of plain dataclasses that pydantic does not model; they are shown by their length.
        emit_json({**_summary(task), **task.model_dump(mode="json", exclude={"oracle"}, exclude_none=True)})
        return
    for key, value in _summary(task).items():
        out.print(f"{key:<16} {value}", markup=False, soft_wrap=True)
    for verb in task.setup:
        out.print(
            f"{'setup':<16} {verb.kind}: {verb.model_dump_json(exclude={'kind'}, exclude_defaults=True)}", markup=False
        )
    if task.checker is not None:
        out.print(f"{'checker':<16} {task.checker.model_dump_json(exclude_defaults=True)}", markup=False)


def _summary(task: Task) -> dict[str, object]:
    return {
        "task_id": task.task_id,
        "level": task.level,
        "instruction": task.instruction.strip(),
        "max_steps": task.max_steps,
        "infeasible": task.infeasible,
        "oracle_step_count": len(task.oracle),
    }
