"""Install OSWorld: its package in a separate virtual environment, and its task files.

```text
<cache>/osworld/venv-<digest16>/   desktop-env and its imports; the digest covers the pinned list and this Python
<cache>/osworld/tasks              symbolic link to a checkout's evaluation_examples
<cache>/osworld/checkout-<...>/    a checkout cloned by envd
```
Each appears in one rename, so that an interrupted installation leaves nothing that looks complete.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import envd
from envd.base.errors import OsworldError
from envd.base.tools import run_tool
from envd.integrations.osworld.workers import KnownNames

PACKAGE = "desktop-env==1.0.2"
#: Number of packages that pip collects, for the progress bar only.
_EXPECTED_PACKAGES = 75
_STAGING = ".making-"
_run = partial(run_tool, error=OsworldError)
#: In the virtual environment: the names of its setup verbs, getters and metrics.
_NAMES_FILE = "envd-names.json"


class Progress(Protocol):
    """Receives the progress of an installation."""

    def __call__(self, stage: str, fraction: float, /) -> None:
        """Report a stage by name and the fraction of the whole that is done, in [0, 1]."""


class Environment:
    """OSWorld's package and tasks under one cache directory."""

    def __init__(self, cache_dir: Path) -> None:
        self.root = cache_dir / "osworld"
        # Everything that determines its content.
        version = f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}-{os.uname().machine}"
        digest = hashlib.sha256("\n".join((PACKAGE, requirements(), version)).encode()).hexdigest()
        self.directory = self.root / f"venv-{digest[:16]}"

    @property
    def python(self) -> Path:
        """The path of its interpreter, installed or not."""
        return self.directory / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        """Whether the package is installed."""
        return self.python.exists()

    @property
    def tasks(self) -> Path | None:
        """The directory with the task files, `evaluation_examples`; None if none is registered."""
        link = self.root / "tasks"
        return link.resolve() if link.is_dir() else None

    def known_names(self) -> KnownNames | None:
        """Return the names in the package, as recorded by its installation; None if they were not recorded."""
        try:
            names = json.loads((self.directory / _NAMES_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return KnownNames(**{key: frozenset(values) for key, values in names.items()})

    def install(self, *, progress: Progress) -> None:
        """Create the virtual environment, unless it exists. Takes minutes and 1.5 GB.

        Raises:
            OsworldError: It cannot be created; nothing is left behind.
        """
        if self.is_installed:
            if self.known_names() is None:
                # Earlier releases did not record them.
                self._record_names(self.directory)
            progress("already installed", 1.0)
            return
        with self._staging() as staging:
            progress("creating a virtual environment", 0.01)
            # venv links to the system's Python, which must stay installed.
            _run([sys.executable, "-m", "venv", str(staging)], what="python -m venv")
            python = str(staging / "bin" / "python")
            pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
            progress(f"installing {PACKAGE}", 0.05)
            _run([*pip, "--no-deps", PACKAGE], what=f"pip install {PACKAGE}")
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
                listed.write(requirements())
                listed.flush()
                _run([*pip, "--requirement", listed.name], on_line=_PipProgress(progress), what="pip install")
            progress("importing it once", 0.95)
            self._record_names(staging)
            try:
                staging.rename(self.directory)
            except OSError as error:
                if not self.is_installed:  # otherwise a concurrent installation was faster
                    raise OsworldError(f"{self.directory} cannot be created: {error}") from error
        progress("installed", 1.0)

    def _record_names(self, directory: Path) -> None:
        """Import the package of an environment and record its names there. Raises: OsworldError: It has no package."""
        python, root = str(directory / "bin" / "python"), str(Path(envd.__file__).parents[1])
        _run([python, "-I", "-c", _IMPORT, root, str(directory / _NAMES_FILE)], what="import desktop_env")

    def register_tasks(self, source: str, *, progress: Progress) -> Path:
        """Register the task files of a checkout of OSWorld for daemons to serve; return their directory.

        Args:
            source: A directory with `evaluation_examples`, used in place; or a URL for `git clone`.
            progress: Receives the progress.

        Raises:
            OsworldError: The checkout does not exist, or contains no tasks.
        """
        directory = Path(source).expanduser()
        if not directory.is_dir():
            if not re.match(r"(\w+://|\w+@[\w.-]+:)", source):
                raise OsworldError(f"{source} is neither a directory nor a URL to clone, such as https://...")
            directory = self._clone(source, progress)
        candidates = (directory / "evaluation_examples", directory)
        examples = next((found for found in candidates if any(found.glob("examples/*/*.json"))), None)
        if examples is None:
            raise OsworldError(f"{directory} is not a checkout of OSWorld: no evaluation_examples/examples/*/*.json")
        self.root.mkdir(parents=True, exist_ok=True)
        link = self.root / f"{_STAGING}tasks-{os.getpid()}"
        link.symlink_to(examples.resolve())
        link.replace(self.root / "tasks")
        progress(f"tasks of {examples}", 1.0)
        return examples.resolve()

    def _clone(self, url: str, progress: Progress) -> Path:
        target = self.root / f"checkout-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        progress("cloning the tasks", 0.1)
        with self._staging() as staging:
            _run(["git", "clone", "--quiet", "--depth", "1", url, str(staging)], what="git clone")
            if target.exists():
                shutil.rmtree(target)
            staging.rename(target)
        return target

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """Yield an empty directory and remove it afterwards unless it was renamed. Holds a lock; removes stale ones."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            flock(lock, LOCK_EX)
            for stale in self.root.glob(f"{_STAGING}*"):
                if stale.is_dir() and not stale.is_symlink():
                    shutil.rmtree(stale, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
            # Evaluations run as unprivileged users.
            staging.chmod(0o755)
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)


#: Only an import shows whether the list of requirements is complete.
_IMPORT = """
import json, sys
sys.path.append(sys.argv[1])
from envd.integrations.osworld.worker.jobs import load_tools, names
with open(sys.argv[2], "w") as file:
    json.dump(names(load_tools()), file)
"""


def requirements() -> str:
    """Return the pinned requirements, without the package itself, in pip's form."""
    return (files("envd.integrations.osworld") / "requirements.txt").read_text()


class _PipProgress:
    """Turns pip's output into a fraction: one part for each collected package, then one for unpacking."""

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._count = 0

    def __call__(self, line: str) -> None:
        collected = re.match(r"Collecting ([\w.-]+)", line)
        if collected:
            self._count += 1
            self._report(f"fetching {collected[1]}", 0.1 + 0.6 * min(1.0, self._count / _EXPECTED_PACKAGES))
        elif line.startswith("Installing collected packages"):
            self._report("unpacking", 0.7)
