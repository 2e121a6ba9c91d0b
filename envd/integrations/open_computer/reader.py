"""Tasks of OpenComputer, `task_generator/tasks/ID/task.json` in its repository, as they are."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envd.base.config_values import OPENCOMPUTER
from envd.integrations.open_computer.verifiers import COMMON, TASKS, VERIFIERS, parts
from envd.tasks.archives import entries
from envd.tasks.fields import checked_path, task_name
from envd.tasks.formats.entries import Fields, Found, Problem, Source, TaskFormatError, make_task

_MAX_TEXT_BYTES = 1 << 20
#: As in OpenComputer.
_MAX_STEPS = 100
_SETUP_TIMEOUT_S = 600.0
_BROWSERS = frozenset({"brave", "chrome", "firefox", "zoom"})
#: Hosts in an instruction. A file's name looks alike, so only the usual endings count.
_HOST = re.compile(r"\b[a-z0-9-]+\.(?:com|dev|edu|gov|io|net|org)\b")
_LOCAL = re.compile(r"\b(?:localhost|127\.0\.0\.1)\b")
#: Needs that are not applications, which no image provides.
INTERNET, LLM_JUDGE, INPUT_FILES = "internet", "llm-judge", "input-files"


def read_repository(root: Path) -> Found:
    """Yield the tasks and the problems of a checkout of OpenComputer, in name order."""
    root = root.resolve()
    found = sorted((root / TASKS).glob("*/task.json"))
    missing = [part for part in COMMON if not (root / part).exists()]
    if missing or not found:
        lacking = ", ".join(missing or [f"{TASKS}/ID/task.json"])
        yield Problem(where=str(root), message=f"lacks {lacking}; name a whole checkout of OpenComputer")
        return
    for file in found:
        yield from _read_task(file, root)


def _read_task(file: Path, root: Path) -> Found:
    source = Source(file=str(file), directory=None, suite=OPENCOMPUTER, makes_bundles=True)
    name = task_name(file.parent.name)
    yield from make_task(source, lambda: (name, lambda: _fields(file, root)), locate=lambda _: source.file)


def _fields(file: Path, root: Path) -> Fields:
    task = _content(file)
    name, app, text, checks = file.parent.name, task.get("app"), task.get("task"), task.get("verification")
    if task.get("id") != name or not isinstance(app, str) or not isinstance(text, str) or not isinstance(checks, list):
        raise TaskFormatError("is not a task: id (its directory's name), app, task and verification are required")
    if not re.fullmatch(r"[a-z0-9_]+", app) or not (root / VERIFIERS / app / f"{app}.py").is_file():
        raise TaskFormatError(f"{app!r} has no verifier {VERIFIERS}/{app}/{app}.py", "app")
    for with_verifier in (False, True):
        try:
            for _ in entries(root, parts(name, app, with_verifier=with_verifier)):
                pass
        except (ValueError, OSError) as error:
            raise TaskFormatError(str(error)) from None
    inputs = _inputs(task.get("env"))
    for index, check in enumerate(checks):
        if not isinstance(check, dict) or not _is_command(check.get("command")):
            raise TaskFormatError("a check has a command", "verification", index)
    difficulty = (task.get("metadata") or {}).get("estimated_difficulty")
    return {
        "instruction": text.strip(),
        "level": min(5, max(1, difficulty if isinstance(difficulty, int) else 3)),
        "domain": app,
        "max_steps": _MAX_STEPS,
        "needs": (app, *_needs(app, text, checks, inputs, file.parent / "env")),
        "freeze_setup": True,
        "setup": [{"kind": OPENCOMPUTER, "root": str(root), "task": name, "timeout_s": _SETUP_TIMEOUT_S}],
        "checker": {
            "kind": OPENCOMPUTER,
            "root": str(root),
            "task": name,
            "app": app,
            "checks": [_check(check) for check in checks],
        },
    }


def _content(file: Path) -> Mapping[str, Any]:
    if file.stat().st_size > _MAX_TEXT_BYTES:
        raise TaskFormatError(f"has more than {_MAX_TEXT_BYTES} bytes")
    try:
        task = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskFormatError(f"cannot be read: {error}") from None
    if not isinstance(task, dict):
        raise TaskFormatError("is not a JSON object")
    return task


def _inputs(env: object) -> list[str]:
    """Return the names of a task's files below `env`. Raises: TaskFormatError: A path leads elsewhere."""
    listed = env.get("files", []) if isinstance(env, dict) else []
    names = []
    for index, file in enumerate(listed):
        try:
            name, path = Path(file["filename"]), checked_path(file["sandbox_path"])
        except (KeyError, TypeError, ValueError) as error:
            raise TaskFormatError(f"is not a file with filename and sandbox_path: {error}", "env", index) from None
        if name.is_absolute() or ".." in name.parts or not path.startswith(("/home/user/", "/tmp/")):  # noqa: S108
            raise TaskFormatError(f"{file} leads outside the task's or the user's directories", "env", index)
        names.append(str(name))
    return names


def _is_command(command: object) -> bool:
    try:
        return isinstance(command, str) and bool(shlex.split(command))
    except ValueError:
        return False


def _check(check: Mapping[str, Any]) -> Fields:
    if "judge" in check:
        # Never run: the task needs a judge, which no image provides.
        return {"command": check["command"], "description": check.get("description", ""), "eval": "False"}
    return {key: check[key] for key in ("command", "description", "key", "expected", "eval") if key in check}


def _needs(app: str, text: str, checks: list[Any], inputs: list[str], env: Path) -> Iterator[str]:
    if any("judge" in check for check in checks):
        yield LLM_JUDGE
    if not (env / "create_env.py").is_file() and any(not (env / name).is_file() for name in inputs):
        yield INPUT_FILES
    if app in _BROWSERS and _HOST.search(text) and not _LOCAL.search(text):
        yield INTERNET
