"""Drawn desktops in the registry of backends."""

import os
from collections.abc import Iterable
from pathlib import Path

from envd.base.config import Config
from envd.hypervisor.backends import Backend
from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.machine import Capabilities, DiskImage, Hypervisor

CAPABILITIES = Capabilities(
    runs_guests=False,
    stand_in_image=DiskImage(name="fake", digest="fake", disk=Path("/dev/null"), disk_format="raw"),
    task_suite="fake",
)

#: A worker costs about 0.5 s of CPU time to start, so few desktops are drawn in the daemon.
_MACHINES_PER_WORKER = 16


async def _open(config: Config, images: Iterable[DiskImage]) -> Hypervisor:  # noqa: ARG001
    from envd.hypervisor.fake.hypervisor import FakeHypervisor  # noqa: PLC0415

    count = config.hypervisor.drawing_processes
    if count is None:
        machine_count = sum(pool.capacity for pool in config.pools.values())
        count = min(machine_count // _MACHINES_PER_WORKER, os.cpu_count() or 1)
    faults = Faults(reaction_s=config.hypervisor.reaction_ms / 1000)
    if count == 0:
        return FakeHypervisor(faults=faults)
    from envd.hypervisor.fake.workers.hypervisor import DrawingWorkers  # noqa: PLC0415

    workers = DrawingWorkers(count, faults=faults)
    try:
        await workers.start()
    except BaseException:
        await workers.close()
        raise
    return workers


BACKEND = Backend(capabilities=CAPABILITIES, open=_open, uris="fake", supports=lambda uri: uri == "fake")
