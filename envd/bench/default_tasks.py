"""Tasks that the demo, the benchmarks and the soak play unless the command line names another one."""

from collections.abc import Mapping
from importlib.resources import files

import yaml
from pydantic import BaseModel, TypeAdapter

from envd.hypervisor.machine import GuestOs


class DefaultTasks(BaseModel):
    """Tasks of one suite, by what they are played for."""

    demo: str
    without_setup: str
    editor: str
    """A task whose desktop has `document` open in an editor."""
    document: str
    settle: tuple[str, ...]


DEFAULT_TASKS: Mapping[str, DefaultTasks] = TypeAdapter(dict[str, DefaultTasks]).validate_python(
    yaml.safe_load((files("envd.bench") / "default_tasks.yaml").read_text(encoding="utf-8"))
)
"""Default tasks by `Capabilities.task_suite`."""

TASKS_WITHOUT_SETUP: Mapping[GuestOs, str] = {
    GuestOs.LINUX: "desktop/open-calculator",
    GuestOs.WINDOWS: "windows/notepad-one-word",
}
"""Tasks to open episodes with on images that a user names: whatever their programs, nothing is set up."""
