"""Install mitmproxy and warcio in a separate virtual environment: they need older packages than the daemon.

```text
<cache>/web/venv-<digest16>/   the programs
<cache>/web/authority/         the certificate authority of this host's recordings; its key never leaves the host
```
"""

import os
from importlib.resources import files
from pathlib import Path

import envd
from envd.base.errors import ConfigError
from envd.base.venv import PinnedEnvironment, Progress

#: mitmproxy's names for the authority: its key with its certificate, and the certificate alone.
AUTHORITY_KEY, AUTHORITY_CERT = "mitmproxy-ca.pem", "mitmproxy-ca-cert.pem"
#: Prefix of every program of the environment: its first argument is the directory of envd's package.
PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); "
ROOT = str(Path(envd.__file__).parents[1])


class WebEnvironment(PinnedEnvironment):
    """The programs of web recordings under one cache directory."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir / "web", (requirements(),), error=ConfigError, package_count=44)

    def require(self) -> None:
        """Do nothing if the programs are installed. Raises: ConfigError: They are not."""
        if not self.is_installed:
            raise ConfigError(f"web recordings: {self.directory} does not exist; run `envd web install`")

    def authority(self) -> Path:
        """Return the directory of the certificate authority; create it if there is none. It is valid for 10 years.

        Raises:
            ConfigError: It cannot be created or read.
        """
        directory = self.root / "authority"
        if not directory.exists():
            with self._staging() as staging:
                self._run([str(self.python), "-I", "-c", _CREATE_AUTHORITY, str(staging)], what="mitmproxy's authority")
                staging.chmod(0o700)
                if not directory.exists():  # otherwise another daemon was faster
                    staging.rename(directory)
        if not os.access(directory / AUTHORITY_KEY, os.R_OK):
            raise ConfigError(f"{directory}: cannot be read; it belongs to another user, or remove it")
        return directory

    def _fill(self, staging: Path, progress: Progress) -> None:
        self._pip(staging, "--no-deps", requirements=requirements(), progress=progress)
        progress("importing it once", 0.95)
        program = [str(staging / "bin" / "python"), "-I", "-c", "import mitmproxy.tools.dump, warcio"]
        self._run(program, what="import mitmproxy")


_CREATE_AUTHORITY = """
import sys
from pathlib import Path
from mitmproxy.certs import CertStore
CertStore.create_store(Path(sys.argv[1]), "mitmproxy", 2048, "envd", "envd web recordings")
"""


def requirements() -> str:
    """Return the pinned requirements in pip's form."""
    return (files("envd.integrations.web") / "requirements.txt").read_text()
