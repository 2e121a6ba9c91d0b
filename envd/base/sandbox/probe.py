"""Probe of the sandbox: whether this host and user can create one."""

import subprocess
import sys
from pathlib import Path

import envd
from envd.base.checks import HostCheck, ok, warn
from envd.base.sandbox.cgroup import find_hierarchy, shortcoming

_ENTER_SANDBOX = """
import sys
sys.path.append(sys.argv[1])
from envd.base.sandbox import enclosure
sys.exit(enclosure.problem() or 0)
"""


def sandbox_problem() -> str:
    """Return why this user cannot create a sandbox on this host; empty if it can.

    A new process tries it, so that this one may have threads. `enclosure.problem` is faster in one without.
    """
    command = [sys.executable, "-I", "-c", _ENTER_SANDBOX, str(Path(envd.__file__).parents[1])]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if process.returncode == 0 else (process.stderr.strip().splitlines() or ["no error message"])[-1]


def check_sandbox() -> HostCheck:
    """Check the sandbox of judge workers and of OSWorld's code."""
    if problem := sandbox_problem():
        return warn(
            "sandbox",
            f"cannot be created: {problem}; judges run with limits only, and OSWorld's evaluators do not run",
            fix="run envd as root, or allow user namespaces (kernel.unprivileged_userns_clone=1)",
        )
    limits = shortcoming(find_hierarchy()) or "memory and processors are limited per job"
    return ok("sandbox", f"judges and OSWorld's evaluators are confined; {limits}")
