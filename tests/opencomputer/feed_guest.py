"""Feeds states to the verifiers of tasks, in a guest. Imports nothing of envd; `feed.py` stages and calls it.

`python3 feed_guest.py REQUEST` prints a JSON line per state.
"""

# Verifiers import most of these. Their forks have them already.
import array  # noqa: F401
import base64  # noqa: F401
import configparser  # noqa: F401
import gc
import hashlib
import json
import os
import re  # noqa: F401
import shlex
import shutil
import signal
import struct  # noqa: F401
import subprocess
import sys
import tempfile
import traceback  # noqa: F401
import wave  # noqa: F401
import xml.etree.ElementTree  # noqa: F401
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import states  # type: ignore[import-not-found]  # next to it in the guest

HERE = Path(__file__).resolve().parent
HOME = Path("/home/user")
#: A verifier of files takes about 0.1 s.
LIMIT_S = 20


def run(argv: list[str], cwd: Path = HOME) -> subprocess.CompletedProcess[str] | None:
    """Run a program as root, with the user's home; None if it does not end in time."""
    env = {"HOME": str(HOME), "PATH": "/usr/bin:/bin:/usr/local/bin", "LANG": "C.UTF-8"}
    try:
        return subprocess.run(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def set_up(task: dict[str, Any]) -> None:
    """Make the files of a task in an empty home."""
    for each in HOME.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
    for name in ("Documents", "Music", "Pictures", "Videos", "Desktop", "Downloads"):
        (HOME / name).mkdir(exist_ok=True)
    env = HERE / "tasks" / task["id"] / "env"
    missing = False
    for entry in task["env"].get("files", []):
        source, target = env / entry["filename"], Path(entry["sandbox_path"])
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copy(source, target)
        else:
            missing = True
    if missing and (env / "create_env.py").is_file():
        run(["python3", str(env / "create_env.py")])
    for entry in task["env"].get("files", []):
        if str(entry["filename"]).startswith("setup_"):
            run(["python3" if entry["sandbox_path"].endswith(".py") else "bash", entry["sandbox_path"]])


def run_verifier(path: Path, arguments: list[str]) -> tuple[str, str] | None:
    """Run a verifier in a fork, without starting Python; return what it printed, or None if it does not end in time."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            os.chdir(HOME)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            sys.argv = [str(path), *arguments]
            code = 0
            try:
                exec(compiled(path), {"__name__": "__main__", "__file__": str(path)})  # noqa: S102 -- as a program
            except SystemExit:
                pass
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            return None
        stdout.seek(0)
        stderr.seek(0)
        return stdout.read(1 << 20).decode(errors="replace"), stderr.read(1 << 16).decode(errors="replace")


@cache
def compiled(path: Path) -> CodeType:
    """Return the code of a verifier."""
    return compile(path.read_bytes(), path, "exec")


def verify(app: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the score, or why there is none, and the evidence of each check."""
    outputs: dict[str, Any] = {}
    passed = []
    evidence = []
    for check in checks:
        command = check["command"]
        if command not in outputs:
            verifier = HERE / "verifiers" / app / f"{app}.py"
            outputs[command] = run_verifier(verifier, shlex.split(command))
        done = outputs[command]
        if done is None:
            return {"score": None, "detail": f"{command}: did not end in {LIMIT_S} s"}
        try:
            found = json.loads(done[0])
        except ValueError:
            return {"score": None, "detail": f"{command}: printed no JSON: {done[1][-200:]}"}
        try:
            if check.get("eval"):
                good = bool(eval(check["eval"], {"result": found}))  # noqa: S307 -- OpenComputer's, in the guest
            else:
                good = found.get(check["key"]) == check.get("expected")
        except Exception:
            good = False
        passed.append(good)
        if not good:
            evidence.append(f"{command}: {json.dumps(found)[:120]}")
    return {"score": sum(passed) / len(passed), "detail": "; ".join(evidence)[:400]}


def make(task: dict[str, Any], state: dict[str, Any]) -> None:
    """Make a state of a task."""
    if state["how"] == "empty":
        states.empty(task["checks"])
    elif state["how"] == "checked":
        states.write(task["app"], state["checks"])
    for command in state.get("then", ()):
        run(["bash", "-c", command])


def digest() -> str:
    """Return a digest of the user's files."""
    found = hashlib.sha256()
    for path in sorted(HOME.rglob("*")):
        found.update(f"{path} {path.lstat().st_mode} {os.readlink(path) if path.is_symlink() else ''}".encode())
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24:
            found.update(path.read_bytes())
    return found.hexdigest()


def feed(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each state that differs from those before."""
    seen: set[str] = set()
    base = HERE / "base"
    set_up(task)
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(HOME, base, symlinks=True)
    for state in task["states"]:
        for each in HOME.iterdir():
            shutil.rmtree(each, ignore_errors=True) if each.is_dir() and not each.is_symlink() else each.unlink()
        shutil.copytree(base, HOME, symlinks=True, dirs_exist_ok=True)
        try:
            make(task, state)
        except (OSError, ValueError, KeyError, IndexError, AttributeError) as error:
            yield {"task": task["id"], "name": state["name"], "kind": state["kind"], "impossible": repr(error)[:200]}
            continue
        # The state does not depend on this word: its change gives the same state.
        if (found_digest := digest()) in seen:
            continue
        seen.add(found_digest)
        found = verify(task["app"], task["checks"])
        yield {"task": task["id"], "name": state["name"], "kind": state["kind"], **found}


if __name__ == "__main__":
    gc.freeze()
    os.environ["HOME"] = str(HOME)
    for each in json.loads(Path(sys.argv[1]).read_text()):
        for line in feed(each):
            print(json.dumps(line), flush=True)
