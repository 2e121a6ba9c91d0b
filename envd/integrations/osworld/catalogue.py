"""OSWorld's task files as tasks: OSWorld's own code performs their setup and their evaluators."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from envd.base.errors import OsworldError
from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld import DESKTOP_TASK
from envd.integrations.osworld.files import OsworldFile, read_files
from envd.tasks.formats.osworld import without_notes
from envd.tasks.model import Task

#: The image with the applications that OSWorld's Linux tasks expect. A caller can name a pool with another image.
IMAGE = "osworld"
#: OSWorld does not grade its tasks.
_LEVEL = 3
#: The largest limit in OSWorld's own reports.
_MAX_STEPS = 100


def osworld_tasks(directory: Path) -> Iterator[Task]:
    """Yield the tasks below an `evaluation_examples`. Raises: OsworldError: A file is not a task; names it."""
    yield from map(to_task, read_files(directory))


def desktop_task() -> Task:
    """Return the task without setup whose episodes are machines of `DesktopEnv`. Not a task for agents."""
    return Task(
        task_id=DESKTOP_TASK,
        instruction="A desktop as it starts: OSWorld's DesktopEnv sets it up and scores it.",
        level=1,
        image=IMAGE,
        infeasible=True,
    )


def to_task(file: OsworldFile) -> Task:
    """Return a task file as a task. Raises: OsworldError."""
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
        raise OsworldError(f"{file.path}: {error}") from error
