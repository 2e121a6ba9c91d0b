"""Tasks that the demo, the benchmarks and the soak play unless the command line names another one."""

from collections.abc import Mapping
from dataclasses import dataclass

from envd.hypervisor.machine import GuestOs


@dataclass(frozen=True, slots=True, kw_only=True)
class EditorTask:
    """A task whose desktop has one document open in an editor."""

    task_id: str
    document: str
    """The document's path in the guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultTasks:
    """Tasks of one suite, by what they are played for."""

    demo: str
    without_setup: str
    load: str
    """Played by all clients of the scale benchmark at once."""
    editor: EditorTask
    frames: tuple[str, ...]
    """Their screens change in different ways: typing, dialogs, menus, new windows, files, the mouse."""


DEFAULT_TASKS: Mapping[str, DefaultTasks] = {
    "desktop": DefaultTasks(
        demo="desktop/save-shopping-list",
        without_setup="desktop/open-calculator",
        load="desktop/open-calculator",
        editor=EditorTask(task_id="desktop/type-greeting", document="/home/user/Documents/greeting.txt"),
        frames=(
            "desktop/save-shopping-list",
            "desktop/replace-everywhere",
            "desktop/uppercase-by-menu",
            "desktop/rename-file",
            "desktop/calculate-and-note",
            "desktop/terminal-from-desktop-menu",
        ),
    ),
    "fake": DefaultTasks(
        demo="fake/save-note",
        without_setup="fake/save-note",
        load="fake/count-to-five",
        editor=EditorTask(task_id="fake/append-line", document="/home/user/list.txt"),
        frames=("fake/save-note", "fake/move-and-count"),
    ),
}
"""Default tasks by `Capabilities.task_suite`."""

TASKS_WITHOUT_SETUP: Mapping[GuestOs, str] = {
    GuestOs.LINUX: "desktop/open-calculator",
    GuestOs.WINDOWS: "windows/notepad-one-word",
}
"""Tasks to open episodes with on images that a user names: whatever their programs, nothing is set up."""
