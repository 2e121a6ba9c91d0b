"""Opens the hypervisor backend that the configuration selects."""

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
        return _open_fake(config)
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


def _open_fake(config: Config) -> Hypervisor:
    # Imported lazily: a daemon with real machines does not need them.
    from envd.hypervisor.fake import FakeHypervisor, Faults  # noqa: PLC0415

    return FakeHypervisor(faults=Faults(reaction_s=config.hypervisor.reaction_ms / 1000))
