"""Run the adapters' tests with the newest releases of their frameworks: `make adapters-newest`.

The environments are those of `make adapters-proof`, which installs its pinned releases again the next time it runs.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_COLUMNS = "{:<16} {:<10} {:<10} {:<10} {}"


def pins(name: str) -> dict[str, str]:
    """Return the pinned releases of an environment. Not torch, whose pin names a release that has builds for a CPU."""
    text = (ROOT / f"tests/adapters/requirements/{name}.txt").read_text(encoding="utf-8")
    return {package: pin for package, pin in re.findall(r"^(\S+)==(\S+)$", text, re.MULTILINE) if package != "torch"}


def result_of(name: str) -> str:
    """Install the newest releases and run an adapter's tests; return `passed`, or what broke."""
    stamp = ROOT / f".venv-adapters-{name}/.installed"
    stamp.unlink(missing_ok=True)
    if subprocess.run(["make", f".venv-adapters-{name}/.installed", "NEWEST=1"], cwd=ROOT, check=False).returncode:
        return "cannot be installed"
    # What is installed now is not what the pins say.
    stamp.unlink(missing_ok=True)
    tests = ["-m", "pytest", "--long", "-rfE", f"tests/adapters/{name}"]
    done = subprocess.run([_python(name), *tests], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return "passed" if done.returncode == 0 else f"exit status {done.returncode}: {', '.join(failed)}"


def releases(name: str, package: str) -> tuple[str, str]:
    """Return the newest release of a package and the installed one; `-` for one that is unknown."""
    newest = re.search(r"\((\S+)\)", _pip(name, "index", "versions", package))
    installed = re.search(r"^Version: (\S+)$", _pip(name, "show", package), re.MULTILINE)
    return newest[1] if newest else "-", installed[1] if installed else "-"


def _pip(name: str, *arguments: str) -> str:
    command = [_python(name), "-m", "pip", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout


def _python(name: str) -> str:
    return f".venv-adapters-{name}/bin/python"


def main(names: list[str]) -> None:
    """Test adapters, print a table of their frameworks, and exit with 1 if one broke."""
    results = {name: result_of(name) for name in names}
    print(_COLUMNS.format("package", "pinned", "newest", "tested", "result"))
    for name, result in results.items():
        for package, pinned in pins(name).items():
            print(_COLUMNS.format(package, pinned, *releases(name, package), f"{name}: {result}"))
    sys.exit(any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
