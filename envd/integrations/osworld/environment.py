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
from importlib.resources import files
from pathlib import Path

import envd
from envd.base.checks import HostCheck, ok, warn
from envd.base.config import Config
from envd.base.errors import OsworldError
from envd.base.venv import STAGING, PinnedEnvironment, Progress
from envd.integrations.osworld.workers import KnownNames

PACKAGE = "desktop-env==1.0.2"
#: In the virtual environment: the names of its setup verbs, getters and metrics.
_NAMES_FILE = "envd-names.json"


def examples_of(source: str) -> Path | None:
    """Return the directory of the task files of a checkout of OSWorld, or None for a URL.

    Raises:
        OsworldError: The checkout does not exist, or contains no tasks.
    """
    directory = Path(source).expanduser()
    if not directory.is_dir():
        if re.match(r"(\w+://|\w+@[\w.-]+:)", source):
            return None
        raise OsworldError(f"{source} is neither a directory nor a URL to clone, such as https://...")
    return _examples_in(directory)


def _examples_in(directory: Path) -> Path:
    candidates = (directory / "evaluation_examples", directory)
    examples = next((found for found in candidates if any(found.glob("examples/*/*.json"))), None)
    if examples is None:
        raise OsworldError(f"{directory} is not a checkout of OSWorld: no evaluation_examples/examples/*/*.json")
    return examples


class Environment(PinnedEnvironment):
    """OSWorld's package and tasks under one cache directory."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir / "osworld", (PACKAGE, requirements()), error=OsworldError, package_count=75)

    @property
    def tasks(self) -> Path | None:
        """The directory with the task files, `evaluation_examples`; None if none is registered."""
        link = self.root / "tasks"
        return link.resolve() if link.is_dir() else None

    def known_names(self) -> KnownNames | None:
        """Return the names in the package, as recorded by its installation; None if they were not recorded."""
        try:
            names: KnownNames = json.loads((self.directory / _NAMES_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return names

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
        super().install(progress=progress)

    def _fill(self, staging: Path, progress: Progress) -> None:
        progress(f"installing {PACKAGE}", 0.05)
        self._pip(staging, "--no-deps", PACKAGE)
        self._pip(staging, requirements=requirements(), progress=progress)
        progress("importing it once", 0.95)
        self._record_names(staging)

    def _record_names(self, directory: Path) -> None:
        """Import the package of an environment and record its names there. Raises: OsworldError: It has no package."""
        python, root = str(directory / "bin" / "python"), str(Path(envd.__file__).parents[1])
        self._run([python, "-I", "-c", _IMPORT, root, str(directory / _NAMES_FILE)], what="import desktop_env")

    def register_tasks(self, source: str, *, progress: Progress) -> Path:
        """Register the task files of a checkout of OSWorld for daemons to serve; return their directory.

        Args:
            source: A directory with `evaluation_examples`, used in place; or a URL for `git clone`.
            progress: Receives the progress.

        Raises:
            OsworldError: The checkout does not exist, or contains no tasks.
        """
        examples = examples_of(source) or _examples_in(self._clone(source, progress))
        self.root.mkdir(parents=True, exist_ok=True)
        link = self.root / f"{STAGING}tasks-{os.getpid()}"
        link.symlink_to(examples.resolve())
        link.replace(self.root / "tasks")
        progress(f"tasks of {examples}", 1.0)
        return examples.resolve()

    def _clone(self, url: str, progress: Progress) -> Path:
        target = self.root / f"checkout-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        progress("cloning the tasks", 0.1)
        with self._staging() as staging:
            self._run(["git", "clone", "--quiet", "--depth", "1", url, str(staging)], what="git clone")
            if target.exists():
                shutil.rmtree(target)
            staging.rename(target)
        return target


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


def check_osworld(config: Config) -> HostCheck:
    """Check that OSWorld's tasks, if registered, can be served. Nothing else needs OSWorld."""
    environment = Environment(config.cache_dir)
    installed = "installed" if environment.is_installed else "not installed"
    tasks = f"tasks in {environment.tasks}" if environment.tasks else "no task files registered"
    if environment.tasks and not environment.is_installed:
        detail = f"{installed}, but {tasks}: their resets fail"
        return warn("osworld", detail, fix="`envd osworld install`")
    return ok("osworld", f"{installed}, {tasks}")
