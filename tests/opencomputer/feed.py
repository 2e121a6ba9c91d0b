"""Feed states that satisfy only the checks of a task, and variations of them, to OpenComputer's verifiers.

`python -m tests.opencomputer.feed CHECKOUT --out FILE --state-dir DIR` takes the tasks of the applications whose
verifiers only read files. The states are made and verified in one machine of the image `office`, without the
application: a state takes about a second, and not a minute. FILE gets a JSON line per state; states that it has are not
fed again.
"""

import argparse
import io
import json
import random
import shlex
import tarfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from cuaenv.client import AsyncEnvClient, View
from envd.authoring.attack.mutants import changed_values
from envd.cli.own_daemon import run_until_signal
from envd.daemon.composition import open_daemon
from envd.integrations.open_computer.verifiers import TASKS, VERIFIERS
from tests.opencomputer import states
from tests.opencomputer.play import settings

HERE = Path(__file__).parent
#: Any task whose application starts soon.
MACHINE = "opencomputer/galculator_compound_arithmetic"
BATCH = 4
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


def staged(root: Path, batch: list[dict[str, Any]]) -> bytes:
    """Return an archive of what a batch needs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("states.py", "feed_guest.py"):
            file.add(HERE / name, name)
        for app in {task["app"] for task in batch}:
            file.add(root / VERIFIERS / app / f"{app}.py", f"verifiers/{app}/{app}.py")
        for task in batch:
            if (env := root / TASKS / task["id"] / "env").is_dir():
                file.add(env, f"tasks/{task['id']}/env")
        data = json.dumps(batch).encode()
        info = tarfile.TarInfo("request.json")
        info.size = len(data)
        file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def run(arguments: argparse.Namespace) -> None:
    """Feed what the file lacks."""
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {(line["task"], line["name"]) for line in map(json.loads, lines)}
    left = list(tasks_of(arguments.checkout))
    random.Random(0).shuffle(left)
    for task in left:
        task["states"] = [state for state in task["states"] if (task["id"], state["name"]) not in done]
    left = [task for task in left if task["states"]]
    stage = "rm -rf /root/feed; mkdir /root/feed; cd /root/feed; tar -xf - --no-same-owner"
    stage += "; exec python3 feed_guest.py request.json"
    async with open_daemon(settings(arguments)) as daemon, AsyncEnvClient(daemon.address, token="") as client:
        view, hour = View(encoding="none"), timedelta(hours=1)
        async with client.reset(MACHINE, view=view, max_steps=1000, timeout=hour) as episode:
            for start in range(0, len(left), BATCH):
                batch = left[start : start + BATCH]
                result = await episode.run_command(
                    ["bash", "-c", stage], as_root=True, stdin=staged(arguments.checkout, batch),
                    timeout=timedelta(minutes=10),
                )  # fmt: skip
                with arguments.out.open("a") as file:
                    file.write(result.stdout.decode())
                print(
                    f"{start + len(batch)} of {len(left)} tasks",
                    result.stderr[-300:].decode(errors="replace"),
                    flush=True,
                )


def main() -> None:
    """Parse the arguments and feed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--hypervisor", default="oci:")
    parser.set_defaults(accelerator="auto", machines=1, oracles=False)
    run_until_signal(run(parser.parse_args()))


if __name__ == "__main__":
    main()
