"""OSWorld's format: one task in one JSON object. OSWorld's own code performs its setup and its evaluator."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, get_args

from pydantic import Field, JsonValue

from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.graded_text import GradedKind
from envd.tasks.fields import Model
from envd.tasks.formats.entries import Fields, TaskFormatError

#: OSWorld does not grade its tasks.
_LEVEL = 3
#: Graded checkers of ours. OSWorld's evaluators of these names differ: they compare the name of a file.
_GRADED = get_args(GradedKind)
#: The user's home directory, in OSWorld's images and in ours.
_HOME = "/home/user"

#: What OSWorld's SetupController implements (desktop-env 1.0.2). OSWorld ignores unknown names, and the episode starts
#: in the wrong state.
_VERBS = frozenset(
    {
        "activate_window", "change_wallpaper", "chrome_close_tabs", "chrome_open_tabs", "close_window", "command",
        "download", "execute", "execute_with_verification", "launch", "open", "sleep", "update_browse_history",
        "upload_file",
    }
)  # fmt: skip
_NEEDS_ACCOUNT = "needs the internet and an account's credentials; episodes have neither"
_UNSUPPORTED = {
    "googledrive": _NEEDS_ACCOUNT,
    "login": _NEEDS_ACCOUNT,
    "proxy": "needs the internet through a proxy; episodes have no network",
}


class OsworldTask(Model):
    """A task as OSWorld writes it. Fields without a meaning here are checked and ignored."""

    id: Annotated[str, Field(min_length=1)]
    instruction: Annotated[str, Field(min_length=1)]
    snapshot: str = ""
    source: JsonValue = None
    config: tuple[dict[str, JsonValue], ...] = ()
    trajectory: JsonValue = None
    related_apps: tuple[str, ...] = ()
    evaluator: dict[str, JsonValue]
    proxy: bool = False
    fixed_ip: bool = False
    possibility_of_env_change: str = ""
    env_may_change: bool = False
    hint: str = ""


def read_osworld(content: Mapping[str, object], *, os: GuestOs | None = None) -> Fields:
    """Return the fields of a task.

    Args:
        os: The guest's operating system, if the caller knows it; otherwise the paths in the task decide.

    Raises:
        TaskFormatError: The task is not supported; names the location.
        ValidationError: A field is missing, unknown or wrong.
    """
    task = OsworldTask.model_validate(content)
    is_windows = any(re.match(r"[A-Za-z]:\\", text) for text in _texts(content))
    system = os or (GuestOs.WINDOWS if is_windows else GuestOs.LINUX)
    fields: Fields = {
        "instruction": task.instruction,
        "level": _LEVEL,
        "tags": task.related_apps,
        "os": system,
        "setup": _setup(task.config, system),
    }
    if task.evaluator.get("func") == "infeasible":
        return {**fields, "infeasible": True}
    return {**fields, "checker": _checker(task.evaluator)}


def without_notes(evaluator: Mapping[str, JsonValue]) -> Fields:
    """Return an evaluator without empty fields and without the notes that some files have among its fields."""
    return {key: value for key, value in evaluator.items() if value is not None and not key.startswith("_")}


def _setup(config: Sequence[Mapping[str, JsonValue]], os: GuestOs) -> list[Fields]:
    """Return a task's `config` as setup verbs: successive steps of OSWorld's in one `osworld` verb.

    An `upload_file` becomes ours, because OSWorld's sandbox cannot read files of the host.
    """
    verbs: list[Fields] = []
    steps: list[Fields] = []
    for index, entry in enumerate(config):
        step = _checked_step(entry, index)
        if step["type"] == "upload_file":
            steps = []
            verbs.append({"kind": "upload_file", "files": _uploads(entry.get("parameters"), os)})
        else:
            if not steps:
                verbs.append({"kind": "osworld", "steps": steps})
            steps.append(step)
    return verbs


def _checked_step(entry: Mapping[str, JsonValue], index: int) -> Fields:
    name, parameters = entry.get("type"), entry.get("parameters") or {}
    if not isinstance(name, str) or not isinstance(parameters, dict) or set(entry) - {"type", "parameters"}:
        raise TaskFormatError(
            "a setup entry has a type (text), parameters (an object) and nothing else", "config", index
        )
    if name in _UNSUPPORTED:
        raise TaskFormatError(f"{name} {_UNSUPPORTED[name]}", "config", index)
    if name not in _VERBS:
        known = ", ".join(sorted(_VERBS))
        raise TaskFormatError(f"unknown setup verb {name!r}; use one of {known}", "config", index, "type")
    return {"type": name, "parameters": parameters}


def _uploads(parameters: JsonValue, os: GuestOs) -> JsonValue:
    """Return the files of an `upload_file`. OSWorld resolves relative guest paths in the user's home directory."""
    files = parameters.get("files") if isinstance(parameters, dict) else None
    if os is GuestOs.WINDOWS or not isinstance(files, list):
        return files
    return [
        {**file, "path": f"{_HOME}/{path.removeprefix('~/')}"}
        if isinstance(file, dict) and isinstance(path := file.get("path"), str) and not path.startswith("/")
        else file
        for file in files
    ]


def _checker(evaluator: Mapping[str, JsonValue]) -> Fields:
    result, expected = evaluator.get("result"), evaluator.get("expected")
    if evaluator.get("func") in _GRADED and isinstance(result, dict) and result.get("type") == "vm_file":
        checker: Fields = {"kind": evaluator["func"], "path": result.get("path")}
        if isinstance(expected, dict) and isinstance(rules := expected.get("rules"), dict):
            checker["text"] = rules.get("expected")
        return checker
    return {"kind": "osworld", **without_notes(evaluator)}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
