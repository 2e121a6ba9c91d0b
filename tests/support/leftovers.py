"""Finds what machines of one state directory left on the host: processes, domains, directories, files, sockets."""

import os
from pathlib import Path

from envd.hypervisor.qemu.processes import machine_pids, owner_of, tpm_processes
from tests.support.containers import container_leftovers

_UNIX_SOCKETS = Path("/proc/net/unix")


def machine_leftovers(state_dir: Path, machine_id: str = "") -> list[str]:
    """List processes, machine directories and libvirt status files of `state_dir`, or of one of its machines.

    For a daemon of containers, their directories and control groups.
    """
    if (state_dir / "containers").exists():
        left = container_leftovers(state_dir, machine_id)
        if left or not (state_dir / "owner").exists():
            return left
    pids = machine_pids(state_dir)
    left = [f"process {pid}" for own_id, pid in pids.items() if machine_id in ("", own_id)]
    tpms = tpm_processes(owner_of(state_dir)) if (state_dir / "owner").exists() else {}
    left += [f"process {pid} of a TPM" for pid, own_id in tpms.items() if machine_id in ("", own_id)]
    left += [str(path) for path in (state_dir / "machines").glob(f"{machine_id}*")]
    # The embedded driver's files about running domains. Its directories have shortened names.
    root = state_dir / "libvirt"
    left += [str(path) for path in (root / "run" / "qemu").glob(f"envd-*-{machine_id}*")]
    if not machine_id:
        left += [str(path) for path in root.glob("lib/qemu/**/domain-*")]
    return left


def control_groups(name: str) -> list[Path]:
    """Return the control groups of this name in all hierarchies, while those of other programs come and go."""
    # `Path.glob` raises if a directory disappears while it looks into it.
    return [Path(root, name) for root, directories, _ in os.walk("/sys/fs/cgroup") if name in directories]


def daemon_leftovers(state_dir: Path) -> list[str]:
    """List everything that a stopped daemon must not leave in `state_dir`; its templates may stay.

    Also works for a daemon that never made a machine there.
    """
    left = machine_leftovers(state_dir) if (state_dir / "owner").exists() else []
    left += [str(path) for path in (state_dir / "captures").glob("*")]
    mark = f"{state_dir}/"
    for line in _UNIX_SOCKETS.read_text().splitlines():
        if path := line.partition(mark)[2]:
            left.append(f"socket {mark}{path}")
    return left
