"""States that satisfy only the checks of a task, and variations of them, for OpenComputer's verifiers.

`python -m tests.opencomputer.feed CHECKOUT DIR` fills DIR for the tasks of the applications whose verifiers only read
files. `python3 DIR/feed_guest.py DIR/request.json`, as root on a machine of the image `office` or in its files, makes
and verifies the states without the applications, and prints a JSON line for each: a state takes a second, and not a
minute.
"""

import argparse
import json
import random
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envd.authoring.attack.mutants import changed_values
from envd.integrations.open_computer.verifiers import TASKS, VERIFIERS
from tests.opencomputer import states

HERE = Path(__file__).parent
#: Variations of one kind in each task.
MOST = 3
#: Tasks of each application whose files are replaced by ones that cannot be read.
PLANTED = 3


def states_of(app: str, checks: list[dict[str, Any]], *, planted: bool) -> Iterator[dict[str, Any]]:
    """Yield the states of a task."""
    yield {"name": "nothing", "kind": "null", "how": "nothing"}
    yield {"name": "empty files with the right names", "kind": "lazy", "how": "empty"}
    yield {"name": "only what is checked", "kind": "knowing", "how": "checked", "checks": checks}
    words = dict.fromkeys(
        word
        for check in checks
        for word in shlex.split(check["command"])[1:]
        if not word.startswith("/") and len(word) > 1
    )
    draw = random.Random(json.dumps(checks))
    chosen = draw.sample(list(words), min(MOST, len(words)))
    for word in chosen:
        for how, value in changed_values(word):
            yield _varied(checks, word, value, f"{word}: {how}", "almost")
        if not word.isdigit():
            yield _varied(checks, word, f"{word} or {word[::-1]}x", f"{word}: hedged", "hedged")
    paths = list(dict.fromkeys(shlex.split(check["command"])[1] for check in checks if " /" in check["command"]))
    base = {"how": "checked", "checks": checks}
    if paths:
        path = shlex.quote(paths[0])
        yield {"name": f"{path} emptied at the end", "kind": "early", **base, "then": [f"[ -f {path} ] && : > {path}"]}
        yield {
            "name": "all files that no check names deleted",
            "kind": "damage",
            **base,
            "then": [f"find ~ -type f -not -path '*/.*' | grep -vF {shlex.quote(chr(10).join(paths))} | xargs -r rm"],
        }
    for path in map(shlex.quote, paths[:1] if planted else ()):
        for name, command in (
            ("link to an endless file", f"ln -s /dev/zero {path}"),
            ("pipe", f"mkfifo {path}"),
            ("2 GB", f"truncate -s 2G {path}"),
            ("link to a file of root", f"ln -s /etc/shadow {path}"),
        ):
            yield {
                "name": f"{name} in place of {path}",
                "kind": "planted",
                **base,
                "then": [f"rm -rf {path}; {command}"],
            }


def _varied(checks: list[dict[str, Any]], word: str, value: str, name: str, kind: str) -> dict[str, Any]:
    changed = [
        {**check, "command": shlex.join(value if each == word else each for each in shlex.split(check["command"]))}
        for check in checks
    ]
    return {"name": name, "kind": kind, "how": "checked", "checks": changed}


def tasks_of(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the tasks with their states."""
    counts: dict[str, int] = {}
    for path in sorted((root / TASKS).glob("*/task.json")):
        task = json.loads(path.read_text())
        if (app := task["app"]) in states.WRITERS and not any("judge" in check for check in task["verification"]):
            counts[app] = counts.get(app, 0) + 1
            own = list(states_of(app, task["verification"], planted=counts[app] <= PLANTED))
            yield {"id": task["id"], "app": app, "env": task["env"], "checks": task["verification"], "states": own}


def stage(root: Path, directory: Path) -> None:
    """Fill a directory with what the states need."""
    directory.mkdir(parents=True)
    tasks = list(tasks_of(root))
    random.Random(0).shuffle(tasks)
    for name in ("states.py", "feed_guest.py"):
        shutil.copy(HERE / name, directory)
    for app in states.WRITERS:
        (directory / "verifiers" / app).mkdir(parents=True)
        shutil.copy(root / VERIFIERS / app / f"{app}.py", directory / "verifiers" / app)
    for task in tasks:
        if (env := root / TASKS / task["id"] / "env").is_dir():
            shutil.copytree(env, directory / "tasks" / task["id"] / "env")
    (directory / "request.json").write_text(json.dumps(tasks))
    print(f"{len(tasks)} tasks, {sum(len(task['states']) for task in tasks)} states")


def main() -> None:
    """Parse the arguments and fill the directory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    stage(arguments.checkout, arguments.directory)


if __name__ == "__main__":
    main()
