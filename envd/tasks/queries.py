"""The commands that query a guest, for each operating system. Pure.

Read-only: they never change the guest. The modules that use a query parse its output.
"""

from typing import NamedTuple

from envd.guest.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs

_PROBE = """
if [ -f "$1" ]; then exec stat -L -c %s -- "$1"
elif [ -e "$1" ] || [ -L "$1" ]; then echo other
else echo absent
fi
"""


class Query(NamedTuple):
    """A command."""

    argv: tuple[str, ...]
    as_root: bool


def file_query(path: str, os: GuestOs) -> Query:
    """Return the command that prints a file's size, `absent`, or `other` for anything else."""
    # As root, so that changed permissions hide nothing. Before reading, because reading from a pipe would block.
    if os is GuestOs.WINDOWS:
        return Query(powershell(Script.PROBE, path=path), as_root=True)
    return Query(("sh", "-c", _PROBE, "probe-file", path), as_root=True)


def process_query(os: GuestOs) -> Query:
    """Return the command that prints the state and name of each process, one a line."""
    if os is GuestOs.WINDOWS:
        return Query(powershell(Script.LIST_PROCESSES), as_root=True)
    return Query(("ps", "-e", "-o", "stat=,comm="), as_root=True)


def window_query(os: GuestOs) -> Query:
    """Return the command that prints the open windows, for `envd.tasks.window_list.parse_windows`."""
    if os is GuestOs.WINDOWS:
        return Query(powershell(Script.LIST_WINDOWS), as_root=True)
    # As the user: windows belong to the session.
    return Query(("wmctrl", "-u", "-l", "-x"), as_root=False)
