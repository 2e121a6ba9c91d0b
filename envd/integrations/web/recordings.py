"""The web recordings of this host: files in the asset cache, by name.

A daemon that records into one has an exclusive lock on its file, and daemons that replay it share one.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import IO, Any

from cuaenv.problems import did_you_mean
from envd.base.config import check_image_name
from envd.base.errors import ConfigError
from envd.integrations.web.environment import PROGRAM, ROOT, WebEnvironment

_SUFFIX = ".warc.gz"


class WebRecordings:
    """The recordings below one directory of assets."""

    def __init__(self, asset_dir: Path) -> None:
        self.directory = asset_dir / "web"

    def list(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and file status of each recording."""
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            yield path.name.removesuffix(_SUFFIX), path.stat()

    def path(self, name: str) -> Path:
        """Return the file of a recording. Raises: ConfigError: There is none, or the name is invalid."""
        path = self._path(name)
        if not path.is_file():
            known = [known for known, _ in self.list()]
            raise ConfigError(f"web recording {name}: not found{did_you_mean(name, known)}; see `envd web list`")
        return path

    def open(self, name: str, *, for_recording: bool) -> IO[bytes]:
        """Open and lock a recording, to replay it or to record more into it. Closing the file unlocks it.

        Raises:
            ConfigError: It does not exist, or another daemon uses it. A recording that is written may be new.
        """
        if for_recording:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Recordings have cookies and what was typed.
            descriptor = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file = os.fdopen(descriptor, "r+b", buffering=0)
        else:
            file = self.path(name).open("rb", buffering=0)
        try:
            flock(file, (LOCK_EX if for_recording else LOCK_SH) | LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"web recording {name}: a daemon uses it; stop that one, or choose another name"
            ) from None
        return file

    def add(self, name: str, source: Path, environment: WebEnvironment) -> int:
        """Copy a WARC file into the directory; return the number of its exchanges.

        Raises:
            ConfigError: The name is taken or invalid, or the file is damaged; nothing was copied.
        """
        target = self._path(name)
        if target.exists():
            raise ConfigError(f"web recording {name}: already exists; run `envd web rm {name}`, or use another name")
        count = len(read_entries(source, environment))
        self.directory.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".part-{os.getpid()}-{target.name}")
        try:
            shutil.copyfile(source, part)
            part.chmod(0o600)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)
        return count

    def remove(self, name: str) -> None:
        """Remove a recording. Raises: ConfigError: It does not exist, or a daemon uses it."""
        path = self.path(name)
        with self.open(name, for_recording=True):
            path.unlink()

    def _path(self, name: str) -> Path:
        try:
            return self.directory / f"{check_image_name(name)}{_SUFFIX}"
        except ValueError as error:
            raise ConfigError(f"web recording {error}") from error


def read_entries(path: Path, environment: WebEnvironment) -> list[dict[str, Any]]:
    """Return the exchanges of a file, as `envd.integrations.web.warc.RecordedExchange` has them.

    Raises:
        ConfigError: It is damaged or cannot be read, or the programs are not installed.
    """
    environment.require()
    program = PROGRAM + "from envd.integrations.web.warc import main; main(sys.argv[1])"
    command = [str(environment.python), "-I", "-c", program, ROOT, str(path.resolve())]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        problem = (process.stderr.strip().splitlines() or ["it cannot be read"])[-1]
        raise ConfigError(f"{path}: {problem}")
    found = json.loads(process.stdout)
    if "error" in found:
        raise ConfigError(f"{path}: {found['error']}; import it again from a whole copy, or record it again")
    return list(found["entries"])
