"""Opens the hypervisor backend that the configuration selects."""

import os
from collections.abc import Iterable
from importlib.util import find_spec

from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.hypervisor.machine import DiskImage, Hypervisor

#: Drawn desktops need no libvirt, whose module is compiled against the host's libvirt.
_HAS_LIBVIRT = find_spec("libvirt") is not None
if _HAS_LIBVIRT:
    # libvirt must be imported before the event loop starts. If it is imported later it cannot start QEMU, whose log
    # then has `Unable to notify child process: Bad file descriptor`.
    from envd.hypervisor.qemu.driver import LibvirtHypervisor

#: A worker costs about 0.5 s of CPU time to start, so few desktops are drawn in the daemon.
_MACHINES_PER_WORKER = 16


async def open_hypervisor(config: Config, *, images: Iterable[DiskImage] = ()) -> Hypervisor:
    """Open the backend of `hypervisor.uri`.

    Args:
        config: Settings; `state_dir` must not be in use by another daemon.
        images: Images that machines will boot from. QEMU's user must be able to read them.

    Raises:
        ConfigError: libvirt's Python module is missing, the accelerator does not work on this host, a path is too long,
            or the user cannot run QEMU.
        HypervisorError: libvirt failed.
    """
    if config.hypervisor_uri == "fake":
        return await _open_fake(config)
    if not _HAS_LIBVIRT:
        raise ConfigError(
            f"hypervisor {config.hypervisor_uri}: the Python module libvirt is missing; install envd with"
            " pip install '.[host]', or serve drawn desktops with --hypervisor fake"
        )
    hypervisor = config.hypervisor
    return await LibvirtHypervisor.open(
        uri=config.hypervisor_uri,
        state_dir=config.state_dir,
        accelerator=hypervisor.accelerator,
        cache_dir=config.cache_dir,
        template_dir=config.template_dir,
        template_memory_dir=hypervisor.template_memory_dir,
        template_limit_bytes=hypervisor.template_limit_bytes,
        tcg_cache_mib=hypervisor.tcg_cache_mib,
        qemu_user=hypervisor.qemu_user,
        images=images,
    )


async def _open_fake(config: Config) -> Hypervisor:
    # Imported lazily: a daemon with real machines does not need them.
    count = config.hypervisor.drawing_processes
    if count is None:
        machine_count = sum(pool.capacity for pool in config.pools.values())
        count = min(machine_count // _MACHINES_PER_WORKER, os.cpu_count() or 1)
    from envd.hypervisor.fake import FakeHypervisor, Faults  # noqa: PLC0415

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
