"""QEMU and swtpm processes of one state directory, found in /proc by their mark; memory and CPU use. Read-only.

Independent of the state of pools and machines, so that benchmarks and tests can verify those from outside.
"""

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process's memory (proc(5), smaps_rollup)."""

    pss_bytes: int
    """Proportional share: a page mapped by n processes counts 1/n."""
    private_dirty_bytes: int
    """Memory that only this process has written."""


def owner_of(state_dir: Path) -> str:
    """Return the owner id that marks everything made for a state directory. Raises: FileNotFoundError: never used."""
    return (state_dir / "owner").read_text().strip()


def marked_processes(owner: str) -> dict[int, str]:
    """Return {process id: machine id} of the QEMU processes that have an owner's mark in their command line."""
    return _find(f"guest=envd-{owner}-")


def tpm_processes(owner: str) -> dict[int, str]:
    """Return {process id: machine id} of the swtpm processes that have an owner's mark in their command line."""
    return _find(tpm_mark(owner))


def tpm_mark(owner: str, machine_id: str = "") -> str:
    """Return the mark of a machine's swtpm process, a part of one of its arguments."""
    return f"prefix=envd-{owner}-{machine_id}"


def _find(mark: str) -> dict[int, str]:
    """Return {process id: rest of the argument up to a comma} of the processes with `mark` in an argument."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue  # It has ended since.
        for argument in arguments:
            _, is_marked, rest = argument.partition(mark.encode())
            if is_marked:
                found[int(entry.name)] = rest.partition(b",")[0].decode()
    return found


def machine_pids(state_dir: Path) -> dict[str, int]:
    """Return {machine id: QEMU's process id} of a state directory's machines; empty if no daemon ever used it."""
    try:
        owner = owner_of(state_dir)
    except FileNotFoundError:
        return {}
    return {machine_id: pid for pid, machine_id in marked_processes(owner).items()}


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process, the program first. Raises: OSError: it has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def memory_of(pid: int) -> ProcessMemory:
    """Measure a process. Raises: OSError: it has ended."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kib = {name: int(rest.split()[0]) for name, _, rest in lines}
    return ProcessMemory(pss_bytes=kib["Pss"] << 10, private_dirty_bytes=kib["Private_Dirty"] << 10)


def written_guest_bytes(pid: int) -> int:
    """Return how much of its guest's memory a fork has written. Raises: OSError: the process has ended.

    Written pages of its private mapping of the template's memory file are anonymous; all others are still the file's.
    """
    paths = {
        option.removeprefix("mem-path=").replace("\0", ",")
        for argument in command_line(pid)
        if argument.startswith("memory-backend-file,")
        for option in argument.replace(",,", "\0").split(",")
        if option.startswith("mem-path=")
    }
    total_kib, is_guest = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # A mapping's first line: addresses first, path last.
            is_guest = line.split(maxsplit=5)[-1] in paths
        elif is_guest and name == "Anonymous:":
            total_kib += int(rest.split()[0])
    return total_kib << 10


def processor_ns(pid: int) -> int:
    """Return the CPU time used by all threads of a process. Raises: OSError: it has ended.

    Read from the process's own clock (clock_getcpuclockid(3)), which counts nanoseconds; /proc counts ticks of 10 ms.
    """
    return time.clock_gettime_ns((~pid << 3) | 2)
