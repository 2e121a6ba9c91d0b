"""A small checkout in the layout of OpenComputer, with a program, a task and a verifier of ours."""

import json
from pathlib import Path

#: The checks of its task.
CHECKS = [
    {"command": "check-file-exists total.txt", "key": "exists", "expected": True, "description": "total.txt exists"},
    {"command": "total", "key": "total", "expected": 7},
    {"command": "total", "eval": "result['total'] > 6", "expected": True},
]

#: A verifier that reads the accessibility tree of its program.
VERIFIER_WITH_TREE = """import json, os, sys
import gi
gi.require_version("Atspi", "2.0")
from gi.repository import Atspi
desktop = Atspi.get_desktop(0)
programs = [desktop.get_child_at_index(index) for index in range(desktop.get_child_count())]
frames = [each.get_child_count() for each in programs if "mousepad" in each.get_name().lower()]
try:
    source = open(__file__).read()
except OSError:
    source = ""
print(json.dumps({"frames": frames, "user": os.getuid(), "source": source}))
"""

_TASK = {
    "id": "notes_total",
    "app": "notes",
    "task": "Write the total of /home/user/Documents/report.csv into total.txt.",
    "env": {"files": [{"filename": "report.csv", "sandbox_path": "/home/user/Documents/report.csv"}]},
    "verification": CHECKS,
    "metadata": {"estimated_difficulty": 2},
}

_VERIFIER = """import json, os, sys, time
os.chdir("/home/user/Documents")
command, *rest = sys.argv[1:]
if command == "check-file-exists":
    print(json.dumps({"exists": os.path.exists(rest[0])}))
elif not os.path.exists("total.txt"):
    print(json.dumps({"error": "no file"}))
    sys.exit(1)
else:
    rows = open("report.csv").read().split()
    print(json.dumps({"total": int(open("total.txt").read()), "rows": len(rows)}))
"""

_BASE = """from dataclasses import dataclass, field
from pathlib import Path
@dataclass
class AppContext:
    sandbox: object
    app_spec: object
    task: dict
    env_backend: str
    display_width: int
    display_height: int
    def list_task_paths(self):
        return [file["sandbox_path"] for file in self.task["env"]["files"]]
@dataclass
class AppSpec:
    app_id: str
    prepare_task_hooks: tuple = ()
    prepare_profile_hooks: tuple = ()
    save_shortcut: str | None = "ctrl+s"
    save_window_name: str | None = None
    def ready_check(self, sandbox):
        return "mousepad" in sandbox.commands.run("pgrep -a mousepad || true").stdout
"""

_FILES = {
    "computer_env/backends/base.py": """from dataclasses import dataclass
@dataclass
class CommandResult:
    command: str
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
class CommandExitException(RuntimeError):
    def __init__(self, command, exit_code, stdout="", stderr=""):
        super().__init__(f"{command}: exit code {exit_code}: {stderr}")
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr
""",
    "evaluation/apps/base.py": _BASE,
    "evaluation/apps/registry.py": """from .base import AppSpec
def get_app_spec(app):
    return AppSpec(app)
""",
    "evaluation/apps/utils.py": """WINDOW_READY_TIMEOUT_SECONDS = 20.0
import time
def describe_windows(sandbox):
    return sandbox.commands.run("wmctrl -l").stdout
def wait_for_app_window_ready(context):
    deadline = time.time() + WINDOW_READY_TIMEOUT_SECONDS
    while time.time() < deadline:
        if "report.csv" in describe_windows(context.sandbox):
            return True
        time.sleep(0.5)
    return False
""",
    "evaluation/apps/save.py": """def auto_save_app(sandbox, app, shortcut, save_window_name=None):
    sandbox.commands.run(f"xdotool search --name report.csv windowactivate --sync && xdotool key {shortcut}")
    return {"ok": True, "message": ""}
""",
    "evaluation/runtime/tasks.py": "",
    "evaluation/runtime/sandbox_session.py": """from pathlib import Path
from computer_env import DEFAULT_DOCKER_IMAGE, create_env
from computer_env.backends.base import CommandExitException
HERE = Path(__file__).resolve().parents[2]
def upload_task_env_files(sandbox, task):
    for file in task["env"]["files"]:
        local = HERE / "task_generator/tasks" / task["id"] / "env" / file["filename"]
        sandbox.files.write(file["sandbox_path"], local.read_bytes())
def run_task_setup_scripts(sandbox, task):
    try:
        sandbox.commands.run("exit 3", timeout=5)
    except CommandExitException as error:
        assert error.exit_code == 3
def launch_app(context):
    context.sandbox.commands.run("mousepad /home/user/Documents/report.csv > /tmp/notes.log 2>&1", background=True)
def format_app_log_excerpt(context, lines=80):
    return Path("/tmp/notes.log").read_text()
""",
    "verifiers/notes/notes.py": _VERIFIER,
    "verifiers/chrome/chrome.py": _VERIFIER,
    "task_generator/tasks/notes_total/task.json": json.dumps(_TASK),
    "task_generator/tasks/notes_total/env/report.csv": "a,3\nb,4\n",
}


def make_repository(directory: Path) -> Path:
    """Write the checkout into a directory, and return that."""
    for name, text in _FILES.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return directory
