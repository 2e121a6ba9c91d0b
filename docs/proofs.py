"""Record which proofs passed on which commit; the text of docs/proofs.md.

Standard library only: proofs run in environments of their own.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = "docs/proofs.json"
#: Results of the tests of a proof of hours on one commit; see tests/support/progress.py.
PROGRESS = "out/progress"
#: Changed by a release itself, after its tests.
_OWN = [".", f":!{FILE}", ":!proto/released.binpb"]

_HEADER = "| target | proves | commit | date |\n|---|---|---|---|\n"


def targets(root: Path) -> dict[str, str]:
    """Return what is proved by each target that records itself: the Makefile's help texts."""
    makefile = (root / "Makefile").read_text("utf-8")
    lines = re.findall(r"^([a-z-]+):(?!=).*?## (.*)\n((?:\t.*\n)*)", makefile, re.MULTILINE)
    versions = re.search(r"^VERSIONS \?= (.*)$", makefile, re.MULTILINE)
    parts = {
        "adapters-proof": sorted(path.stem for path in (root / "tests/adapters/requirements").glob("*.txt")),
        "versions-proof": versions[1].split() if versions else [],
    }
    found: dict[str, str] = {}
    for name, text, recipe in lines:
        if "$(RECORD)" in recipe:
            found |= {f"{name}/{part}": text for part in parts[name]} if name in parts else {name: text}
    return found


def passes(root: Path) -> dict[str, dict[str, Any]]:
    """Return commit and date of the last pass of each target, and under `again` the tests that failed before it."""
    path = root / FILE
    found: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def text(root: Path = ROOT) -> str:
    """Return the text of the page as Markdown."""
    rows, again = [], []
    for name, proved in sorted(targets(root).items()):
        passed = passes(root).get(name, {"commit": "", "date": "not yet"})
        commit = f"`{passed['commit']}`" if passed["commit"] else ""
        rows.append(f"| `{name}` | {proved.partition(' (')[0]} | {commit} | {passed['date']} |\n")
        again += [f"- `{name}`: `{test}`\n" for test in passed.get("again", [])]
    notes = ["\nFailed once on their commit, and passed when run again:\n\n", *again] if again else []
    return _HEADER + "".join(rows + notes)


def missing(root: Path) -> list[str]:
    """Return the targets that have not passed on the tree of the present commit."""
    recorded = passes(root)
    return [name for name in sorted(targets(root)) if not _is_of_this_tree(root, recorded.get(name, {}))]


def record(root: Path, name: str, today: datetime.date) -> str:
    """Note that a target passed; returns what was done."""
    if _changes(root):
        return f"{name}: passed; not recorded, because the tree has changes"
    commit = _git(root, "rev-parse", "--short=10", "HEAD").stdout.strip()
    passed: dict[str, Any] = {"commit": commit, "date": today.isoformat()}
    if again := _failed_before(root, name):
        passed["again"] = again
    found = passes(root) | {name: passed}
    (root / FILE).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return f"{name}: passed on {commit}; recorded in {FILE}"


def progress(root: Path, name: str) -> Path | None:
    """Return the file for the results of a target's tests on this commit, or None if the tree has changes."""
    commit = _git(root, "rev-parse", "HEAD").stdout.strip()
    return None if _changes(root) else root / PROGRESS / f"{name}-{commit}.txt"


def _failed_before(root: Path, name: str) -> list[str]:
    file = progress(root, name)
    lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
    return sorted({line.removeprefix("failed ") for line in lines if line.startswith("failed ")})


def _changes(root: Path) -> str:
    return _git(root, "status", "--porcelain", "--", *_OWN).stdout


def _is_of_this_tree(root: Path, passed: Mapping[str, Any]) -> bool:
    return bool(passed) and not _git(root, "diff", "--quiet", passed["commit"], "HEAD", "--", *_OWN).returncode


def _git(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)


def main() -> None:
    """Run a command.

    `missing` prints the targets to run, and exits with 1 if the tree has changes. `progress` prints the file for the
    results of a target's tests, or an empty line then. `record` notes that a target passed.
    """
    parser = argparse.ArgumentParser(description="Record which proofs passed.")
    parser.add_argument("command", choices=["record", "missing", "progress"])
    parser.add_argument("target", nargs="?", default="")
    given = parser.parse_args()
    match given.command:
        case "record":
            print(record(ROOT, given.target, datetime.datetime.now(datetime.UTC).date()))
        case "missing":
            if changes := _changes(ROOT):
                sys.exit(f"release: the tree has changes; commit or remove them\n{changes}")
            print(*dict.fromkeys(name.partition("/")[0] for name in missing(ROOT)))
        case "progress":
            print(progress(ROOT, given.target) or "")


if __name__ == "__main__":
    main()
