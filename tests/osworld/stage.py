"""Makes the states of tasks, in OSWorld's environment: `python -m tests.osworld.stage DIR`.

Writes `states.json` and the files of each state. `tests.osworld.feed` calls it and plays the states.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tests.osworld import answers, media, office, tables  # noqa: F401 -- they register their makers
from tests.osworld.states import Content, State, Unsupported, Value, Wanted, states_of

#: Getters of a file, or of the path of one.
_FILES = {
    "vm_file",
    "vlc_config",
    "gimp_config_file",
    "vscode_config",
    "googledrive_file",
    "cloud_file",
    "cache_file",
    "vlc_playing_info",
}
_VALUES = {
    "bookmarks", "enabled_experiments", "chrome_font_size", "cookie_data", "history", "shortcuts_on_desktop",
    "list_directory", "vm_command_line", "vm_command_error", "vm_terminal_output", "accessibility_tree",
    "active_tab_html_parse", "active_tab_info", "active_tab_url_parse", "active_url_from_accessTree", "open_tabs_info",
    "page_info", "url_dashPart", "data_delete_automacally", "default_search_engine", "default_video_player",
    "enable_do_not_track", "enable_enhanced_safety_browsing", "find_installed_extension_name",
    "find_unpacked_extension_path", "new_startup_page", "profile_name",
}  # fmt: skip
#: Results of which everything else was there before the task, if its setup made them.
_DOCUMENTS = (".docx", ".xlsx", ".pptx")
#: States that take seconds. They are made for one task of each function.
_SLOW = {"a part of a gigabyte", "289 million pixels", "three million lines"}


class Part(NamedTuple):
    """One function of a task's evaluator."""

    function: str
    result: Mapping[str, Any]
    expected: Mapping[str, Any] | None
    options: Mapping[str, Any]


def parts_of(evaluator: Mapping[str, Any]) -> list[Part]:
    is_list = isinstance(evaluator["func"], list)
    names = evaluator["func"] if is_list else [evaluator["func"]]

    def item(key: str, index: int) -> Any:
        value = evaluator.get(key)
        return value[index] if value and is_list and isinstance(value, list) else value or None

    return [
        Part(name, item("result", i) or {}, item("expected", i), item("options", i) or {})
        for i, name in enumerate(names)
    ]


def _names(getter: Mapping[str, Any]) -> list[str]:
    names = getter.get("dest") or getter.get("path") or getter["type"]
    return [PurePosixPath(str(name)).name for name in (names if isinstance(names, list) else [names])]


class Staged:
    """Writes the files of states, each content once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "files").mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()[:20]
        path = self.directory / "files" / name
        if not path.exists():
            path.write_bytes(data)
        return f"files/{name}"


def inputs_of(config: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the paths of the files that a setup puts into the guest."""
    steps = (step["parameters"].get("files", ()) for step in config if step["type"] in {"download", "upload_file"})
    return {file["path"] for files in steps for file in files}


def states_of_task(task: Mapping[str, Any], staged: Staged) -> Iterator[dict[str, Any]]:
    """Yield the states of a task: all results right, and then one of them wrong. Raises: Unsupported.

    `result` is the number of the wrong result among those that the function scores: there may be several.
    """
    evaluator = task["evaluator"]
    inputs = inputs_of(task.get("config") or ())
    parts = parts_of(evaluator)
    groups: list[tuple[list[int], list[State]]] = []
    for _, numbers in groupby(range(len(parts)), key=lambda i: json.dumps(parts[i].result, sort_keys=True)):
        chosen = list(numbers)
        groups.append((chosen, _states([parts[i] for i in chosen], inputs)))
    if all(state.kind in {"gold", "right"} for _, states in groups for state in states):
        raise Unsupported("no wrong state")
    good = [next(state for state in states if state.kind == "right") for _, states in groups]
    conjunction = evaluator.get("conj", "and")
    job = _job(parts, groups, good, staged, function=parts[-1].function, state=good[0], conjunction=conjunction)
    yield {**job, "result": 1}
    results: Counter[str] = Counter()
    for number, (chosen, states) in enumerate(groups):
        function = parts[chosen[-1]].function
        results[function] += 1
        for state in states:
            if state.kind not in {"gold", "right"}:
                contents = [*good[:number], state, *good[number + 1 :]]
                job = _job(parts, groups, contents, staged, function=function, state=state, conjunction=conjunction)
                yield {**job, "result": results[function]}


def _states(parts: list[Part], inputs: set[str]) -> list[State]:
    states = states_of(_wanted(parts))
    names = _names(parts[-1].result)
    path = str(parts[-1].result.get("path"))
    if path.endswith(_DOCUMENTS) and path not in inputs:
        # What is deleted from a new document may never have been asked for.
        states = [state for state in states if state.kind != "damage"]
    good = next(state.content for state in states if state.kind == "right")
    if len(names) > 1 and isinstance(good, bytes):
        states.append(State("damage", "all files but the first empty", [good, *[b""] * (len(names) - 1)]))
    return states


def _wanted(parts: list[Part]) -> Wanted:
    last = parts[-1]
    getter = last.result
    if getter.get("type") not in _FILES | _VALUES:
        raise Unsupported(f"a result of {getter.get('type')}")
    rules = []
    for part in parts:
        expected = part.expected or {}
        if expected.get("type") in {"rule", None}:
            asked = expected.get("rules", {})
            if not isinstance(asked, dict):
                raise Unsupported("a list of rules")
            rules.append(asked)
        else:
            stem = Path(_names(expected)[0]).stem
            rules.append({"gold_stem": stem, "gold_type": expected["type"]})
    names = "" if getter["type"] in _VALUES else "|".join(_names(getter))
    if isinstance(getter.get("gives"), list) and len(getter["gives"]) > 1 and len(parts) > 1:
        raise Unsupported("several results")
    return Wanted(last.function, rules, dict(last.options), names)


def _job(
    parts: list[Part],
    groups: Any,
    contents: list[State],
    staged: Staged,
    *,
    function: str,
    state: State,
    conjunction: str,
) -> dict[str, Any]:
    files: dict[str, str] = {}
    results: list[Any] = []
    expected: list[Any] = []
    for (chosen, states), content in zip(groups, contents, strict=True):
        golden = next((each.content for each in states if each.kind == "gold"), None)
        for number in chosen:
            part = parts[number]
            results.append(_getter(part.result, content.content, files, staged, is_result=True))
            expected.append(_expected(part, golden, files, staged))
    evaluator: dict[str, Any] = {
        "conj": conjunction,
        "func": [part.function for part in parts],
        "result": results,
        "expected": expected,
        "options": [dict(part.options) for part in parts],
    }
    return {"function": function, "kind": state.kind, "name": state.name, "evaluator": evaluator, "files": files}


def _expected(part: Part, golden: Content, files: dict[str, str], staged: Staged) -> Any:
    if part.expected is None or part.expected["type"] not in {"cloud_file", "vm_file", "cache_file"}:
        return part.expected
    if golden is None:
        raise Unsupported(f"{part.function} with a file to compare with")
    return _getter(part.expected, golden, files, staged, is_result=False)


def _getter(
    getter: Mapping[str, Any], content: Content, files: dict[str, str], staged: Staged, *, is_result: bool
) -> Any:
    """Return a getter of files that the job has already, in place of one that asks a guest or the internet."""
    if isinstance(content, Value):
        return {"type": "rule", "rules": content.value}
    names = _names(getter)
    contents = content if isinstance(content, list) else [content] * len(names)
    if len(contents) != len(names):
        raise Unsupported("another number of files")
    for number, (name, data) in enumerate(zip(names, contents, strict=True)):
        if not is_result and getter["type"] == "cloud_file" and name in files:
            # OSWorld does not download a file that exists, so a result of this name is compared with itself.
            continue
        path = staged.put(data)
        if is_result and files.get(name, path) != path:
            names[number] = f"result-{name}"
        files[names[number]] = path
    if len(names) == 1:
        return {"type": "cloud_file", "path": names[0], "dest": names[0]}
    # A getter of Google Drive returns all of its files.
    given = list(range(len(names))) if getter["type"] == "googledrive_file" else [0]
    return {"type": "cloud_file", "multi": True, "path": names, "dest": names, "gives": getter.get("gives", given)}


def main() -> None:
    """Write the states of tasks, which are `{id: {"evaluator": {}, "config": []}}` on the standard input."""
    directory = Path(sys.argv[1])
    staged = Staged(directory)
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    slow: set[tuple[str, str]] = set()
    for identity, task in json.load(sys.stdin).items():
        try:
            for job in states_of_task(task, staged):
                key = (job["function"], job["name"])
                if key not in slow:
                    found.append({"task": identity, **job})
                if job["name"] in _SLOW:
                    slow.add(key)
        except Unsupported as error:
            left_out[identity] = str(error)
    (directory / "states.json").write_text(json.dumps({"states": found, "left_out": left_out}))


if __name__ == "__main__":
    main()
