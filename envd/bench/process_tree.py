"""CPU time and memory of this process with all of its descendants, from /proc. Read-only."""

import os
from collections import defaultdict
from pathlib import Path

from envd.hypervisor.qemu.processes import memory_of

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_cpu_s() -> float:
    """Return the CPU time in seconds of this process, its live descendants, and all descendants that have ended."""
    return sum(ticks for _, ticks in process_tree()) / _TICKS_PER_S


def tree_pss_bytes() -> int:
    """Return the proportional share of memory of this process and its live descendants."""
    total_bytes = 0
    for pid, _ in process_tree():
        try:
            total_bytes += memory_of(pid).pss_bytes
        except (OSError, KeyError):  # it has ended
            continue
    return total_bytes


def process_tree() -> list[tuple[int, int]]:
    """Return (process id, CPU ticks with those of ended children) of this process, the first, and its descendants."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(entry.name)
        children[int(fields[1])].append(pid)
        # utime, stime, cutime and cstime of proc(5).
        ticks[pid] = sum(map(int, fields[11:15]))
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        found.append((pid, ticks.get(pid, 0)))
        waiting += children[pid]
    return found
