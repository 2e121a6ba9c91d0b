"""The commands `guest-exec` and `guest-exec-status`.

A name that begins with `/` runs in Debian as root, and any other in Wine as the user. `powershell.exe` is answered by
`scripts.py`, and its script `use-tool` by `tools.py`, as the user.
"""

import base64
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from .drive import AgentError, Drive
from .scripts import Output, Scripts

#: The limit of QEMU's agent.
_MAX_OUTPUT_BYTES = 16 << 20
_POWERSHELL = re.compile(r"(?:.*[\\/])?powershell(?:\.exe)?", re.IGNORECASE)
#: The first line of the script, which is answered by a program: it handles files and runs commands as the user.
USE_TOOL = "# envd: use-tool\n"
_TOOLS = f"{__package__}.tools"
#: Directory of this package, or of the outermost one around it.
_PYTHONPATH = str(Path(__file__).parents[_TOOLS.count(".")])
#: Above every process id of Linux.
_FIRST_SCRIPT_ID = 1 << 23


class Processes:
    """Commands of the host, until it has collected their results."""

    def __init__(self, drive: Drive, scripts: Scripts, environ: Mapping[str, str]) -> None:
        self._drive = drive
        self._scripts = scripts
        self._environ = dict(environ)
        self._results: dict[int, dict[str, object] | None] = {}
        self._script_ids = itertools.count(_FIRST_SCRIPT_ID)

    def start(
        self,
        path: str,
        arg: Sequence[str] = (),
        env: Sequence[str] | None = None,
        input_data: str = "",
        capture_output: bool = False,  # noqa: ARG002 output is always captured
    ) -> dict[str, object]:
        """Start a program and return its id. Raises: AgentError: It does not exist; OSError: It cannot be started."""
        is_powershell = _POWERSHELL.fullmatch(path)
        if is_powershell and not (arg and arg[-1].startswith(USE_TOOL)):
            number = next(self._script_ids)
            self._results[number] = None
            threading.Thread(target=self._answer, args=(number, tuple(arg)), daemon=True).start()
            return {"pid": number}
        if is_powershell:
            # -P: the user's documents, the working directory, are not imported from.
            tools = [sys.executable, "-SP", "-m", _TOOLS]
            environ = {**self._environ, "PYTHONPATH": _PYTHONPATH}
            process = self._popen(tools, environ, as_user=True, stderr=subprocess.PIPE)
        else:
            process = self._spawn(path, arg, env)
        self._results[process.pid] = None
        stdin = base64.b64decode(input_data)
        threading.Thread(target=self._collect, args=(process, stdin), daemon=True).start()
        return {"pid": process.pid}

    def status(self, pid: int) -> dict[str, object]:
        """Return whether a command has exited; its result is returned once. Raises: AgentError: no such command."""
        if pid not in self._results:
            raise AgentError(f"Invalid parameter 'pid': {pid} is not a command of this agent")
        result = self._results[pid]
        if result is None:
            return {"exited": False}
        del self._results[pid]
        return result

    def start_in_wine(self, program: str, arguments: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        """Start a Windows program by its Windows path as the user, with pipes for input and output. Raises: OSError."""
        return self._popen(["wine64", program, *arguments], self._environ, as_user=True, stderr=subprocess.DEVNULL)

    def _spawn(self, path: str, arg: Sequence[str], env: Sequence[str] | None) -> "subprocess.Popen[bytes]":
        given = dict(pair.partition("=")[::2] for pair in env or ())
        if path.startswith("/"):
            if not os.access(path, os.X_OK):
                raise _cannot_start(path)
            return self._popen([path, *arg], {**os.environ, **given}, as_user=False, stderr=subprocess.PIPE)
        program = self._drive.program(path)
        if program is None:
            raise _cannot_start(path)
        environ = {**self._environ, **given}
        return self._popen(["wine64", program, *arg], environ, as_user=True, stderr=subprocess.PIPE)

    def _popen(
        self, argv: Sequence[str], environ: Mapping[str, str], *, as_user: bool, stderr: int
    ) -> "subprocess.Popen[bytes]":
        user = self._drive.user
        # Only root can change, and only root runs the agent of a guest.
        changes = as_user and os.geteuid() == 0
        return subprocess.Popen(
            argv,
            env=environ,
            cwd=self._drive.root / "users" / user.pw_name / "Documents" if as_user else "/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            user=user.pw_uid if changes else None,
            group=user.pw_gid if changes else None,
            extra_groups=os.getgrouplist(user.pw_name, user.pw_gid) if changes else None,
        )

    def _collect(self, process: "subprocess.Popen[bytes]", stdin: bytes) -> None:
        stdout, stderr = process.communicate(stdin)
        self._results[process.pid] = _result(Output(stdout, process.returncode, stderr))

    def _answer(self, number: int, arguments: Sequence[str]) -> None:
        self._results[number] = _result(self._scripts.run(arguments))


def _result(output: Output) -> dict[str, object]:
    """Return the response of `guest-exec-status`."""
    ended = {"signal": -output.exit_code} if output.exit_code < 0 else {"exitcode": output.exit_code}
    result: dict[str, object] = {"exited": True, **ended}
    for name, data in (("out", output.stdout), ("err", output.stderr)):
        result[f"{name}-data"] = base64.b64encode(data[:_MAX_OUTPUT_BYTES]).decode()
        if len(data) > _MAX_OUTPUT_BYTES:
            result[f"{name}-truncated"] = True
    return result


def _cannot_start(path: str) -> AgentError:
    return AgentError(f"Failed to execute child process “{path}” (No such file or directory)")
