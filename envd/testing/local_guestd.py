"""guestd without a guest: the real service as a process of this host, with a home directory of its own."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from envd.guestd import guestd


class LocalGuestd(NamedTuple):
    """One that runs."""

    url: str
    home: Path
    process: subprocess.Popen[bytes]


def serve_guestd(stack: ExitStack, home: Path) -> LocalGuestd:
    """Start one, to end with `stack`; its commands run on this host, as this user."""
    home.mkdir(parents=True)
    command = (sys.executable, guestd.__file__, "--host", "127.0.0.1", "--port", "0")
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
    process = stack.enter_context(subprocess.Popen(command, env=env, stderr=subprocess.PIPE))
    stack.callback(process.terminate)
    assert process.stderr
    port = int(process.stderr.readline().rpartition(b":")[2])
    return LocalGuestd(f"http://127.0.0.1:{port}", home, process)
