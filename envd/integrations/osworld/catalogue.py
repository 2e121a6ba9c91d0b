"""OSWorld's task files as tasks: OSWorld's own code performs their setup and their evaluators."""

from pathlib import Path

from pydantic import ValidationError

from cuaenv.problems import problem_of
from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld import DESKTOP_TASK
from envd.integrations.osworld.files import OsworldFile, read_files
from envd.integrations.osworld.format import without_notes
from envd.tasks.formats.entries import Found, Problem
from envd.tasks.model import Task

#: The image with the applications that OSWorld's Linux tasks expect. A caller can name a pool with another image.
IMAGE = "osworld"
#: OSWorld does not grade its tasks.
_LEVEL = 3
#: The largest limit in OSWorld's own reports.
_MAX_STEPS = 100


def osworld_tasks(directory: Path) -> Found:
    """Yield the tasks below an `evaluation_examples`, and the problems of files that are not tasks."""
    files, problems = read_files(directory)
    yield from problems
    seen: dict[str, OsworldFile] = {}
    for file in files:
        first = seen.setdefault(file.task_id, file)
        if first is file:
            yield to_task(file)
        else:
            message = f"duplicate id, already in {first.path}; rename one of them"
            yield Problem(where=str(file.path), task_id=file.task_id, message=message)


def desktop_task() -> Task:
    """Return the task without setup whose episodes are machines of `DesktopEnv`. Not a task for agents."""
    return Task(
        task_id=DESKTOP_TASK,
        instruction="A desktop as it starts: OSWorld's DesktopEnv sets it up and scores it.",
        level=1,
        image=IMAGE,
        infeasible=True,
    )


def to_task(file: OsworldFile) -> Task | Problem:
    """Return a task file as a task, or its first problem."""
    fields: dict[str, object] = {
        "task_id": file.task_id,
        "instruction": file.content["instruction"],
        "level": _LEVEL,
        "domain": file.domain,
        "tags": (file.domain,),
        "os": file.os,
        "image": IMAGE if file.os is GuestOs.LINUX else "",
        "max_steps": _MAX_STEPS,
        "setup": [{"kind": "osworld", "steps": file.setup}] if file.setup else [],
        "infeasible": file.is_infeasible,
    }
    if not file.is_infeasible:
        fields["checker"] = {"kind": "osworld", **without_notes(file.evaluator)}
    try:
        return Task.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Problem(where=str(file.path), task_id=file.task_id, field=where, message=problem_of(first))
