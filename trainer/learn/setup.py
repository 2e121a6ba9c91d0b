"""What `trainer learn` needs besides this package: slime's code at one commit, and packages of the extra `learn`."""

import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

from cuaenv.cli.terminal import ProgressReport
from trainer.learn import LearnError

#: The commit whose rollout, advantages and loss are tested here.
COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
URL: Final = "https://github.com/THUDM/slime"
_PROGRESS = re.compile(r"(?:remote: )?([\w ]+):\s+(\d+)%")
#: No prompt for a password, and an end if nothing arrives for a minute.
_ENVIRON: Final = {"GIT_TERMINAL_PROMPT": "0", "GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "60"}


def default_home() -> Path:
    """Return the directory of the checkout that `fetch_slime` makes by default; its name has the commit."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "trainer", f"slime-{COMMIT[:9]}")


def is_checkout(home: Path) -> bool:
    return (home / "slime" / "rollout").is_dir()


def missing_packages() -> list[str]:
    """Return the packages of the extra `learn` that are not installed."""
    wanted = [line for line in metadata.requires("envd-trainer") or () if re.search(r"extra == .learn\b", line)]
    names = {re.split(r"[^\w.-]", line)[0] for line in wanted}
    return sorted(name for name in names if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def fetch_slime(source: str, home: Path, *, report: ProgressReport) -> None:
    """Check out slime's code, without its history, as a new directory; complete or not at all.

    Args:
        source: URL, or a local repository that has the commit.
        home: The directory; it does not exist yet, or is empty.

    Raises:
        LearnError: git is missing, the source cannot be read or lacks the commit, or the directory has other content.
    """
    if home.is_dir() and any(home.iterdir()):
        raise LearnError(f"{home}: has other content than slime's code; remove it, or give --slime-home")
    if shutil.which("git") is None:
        raise LearnError(f"git: not installed; install it, or unpack slime {COMMIT} from {URL} as {home}")
    where = str(Path(source).expanduser().resolve()) if Path(source).expanduser().exists() else source
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".slime-") as folder:
        work = Path(folder, "slime")
        try:
            _git("init", "--quiet", str(work), report=report)
            _git("-C", str(work), "fetch", "--progress", "--depth=1", where, COMMIT, report=report)
            _git("-C", str(work), "checkout", "--quiet", "FETCH_HEAD", report=report)
        except LearnError as error:
            raise LearnError(
                f"slime from {source}: {error}; without a network, clone {URL} elsewhere, copy it here and run"
                " `trainer learn setup --slime-source DIR`"
            ) from error
        work.rename(home)


def _git(*arguments: str, report: ProgressReport) -> None:
    """Run git. Raises: LearnError: It failed, with its last line or its fatal error."""
    last, shown = "", ("", "")
    with subprocess.Popen(
        ["git", *arguments], env=os.environ | _ENVIRON, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        for line in process.stderr or ():
            if match := _PROGRESS.match(line):
                if match.groups() != shown:
                    shown = (match[1], match[2])
                    report(match[1], int(match[2]) / 100)
            elif line.strip() and not last.startswith("fatal:"):  # its explanation follows it
                last = line.strip()
    if process.returncode:
        raise LearnError(last or f"git exited with status {process.returncode}")
