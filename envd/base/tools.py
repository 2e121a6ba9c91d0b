"""Runs programs of the host to their end."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from envd.base.errors import EnvdError

_TAIL_LINES = 25


def run_tool(
    command: Sequence[str],
    *,
    what: str,
    error: type[EnvdError],
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a program. If interrupted, terminate it and wait until it has cleaned up (mmdebstrap unmounts).

    Raises:
        EnvdError: Of the type `error`: it is missing or failed; the message has the end of its output.
    """
    tail: list[str] = []
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    except OSError as missing:
        raise error(f"{what} cannot be run: {missing}") from missing
    with process:
        try:
            for line in process.stdout or ():
                tail = [*tail[1 - _TAIL_LINES :], line.rstrip()]
                if on_line:
                    on_line(line)
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if status != 0:
        raise error(f"{what} failed with status {status}:\n" + "\n".join(tail))
