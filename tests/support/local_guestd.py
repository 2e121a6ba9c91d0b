"""Run the real guestd as a process on this host, with its own home directory."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import envd.guests.guestd


class LocalGuestd(NamedTuple):
    """A running guestd."""

    url: str
    home: Path
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        """Its port on the loopback."""
        return int(self.url.rpartition(":")[2])


def serve_guestd(stack: ExitStack, home: Path, *, env: dict[str, str] | None = None) -> LocalGuestd:
    """Start guestd until `stack` closes, as in a guest: `python3 -m guestd`. Its commands run as this user.

    Args:
        stack: Terminates the process.
        home: The home directory, created if missing.
        env: Environment variables besides PATH, HOME and LANG.
    """
    home.mkdir(parents=True, exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **(env or {})}
    package = Path(envd.guests.guestd.__file__).parent
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), env.get("PYTHONPATH")]))
    command = (sys.executable, "-m", package.name, "--host", "127.0.0.1", "--port", "0")
    process = stack.enter_context(subprocess.Popen(command, env=env, stderr=subprocess.PIPE))
    stack.callback(process.terminate)
    assert process.stderr
    port = int(process.stderr.readline().rpartition(b":")[2])
    return LocalGuestd(f"http://127.0.0.1:{port}", home, process)
