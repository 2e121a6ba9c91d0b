"""The checks of `envd doctor` for containers."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from envd.base.checks import HostCheck, as_root, fail, ok, warn
from envd.base.config import Config, HypervisorConfig
from envd.base.errors import EnvdError
from envd.hypervisor.backends import open_hypervisor
from envd.hypervisor.oci.backend import is_oci

_NAME: Final = "containers"
_OPEN_TIMEOUT_S: Final = 60.0
_INOTIFY_INSTANCES: Final = Path("/proc/sys/fs/inotify/max_user_instances")
#: Message buses, panel and file dialogs of one desktop.
_INOTIFY_PER_DESKTOP, _MANY_DESKTOPS = 6, 200
_DELEGATE: Final = "run envd in a systemd unit with Delegate=yes, or as root"


def unused_by_containers(config: Config, name: str) -> HostCheck | None:
    """Return the finding about something that only virtual machines use; None if machines are those."""
    return ok(name, "not used by containers") if is_oci(config.hypervisor.uri) else None


async def check_containers(config: Config) -> Sequence[HostCheck]:
    """Create the namespaces of containers as the daemon does, in a temporary state directory."""
    is_used = is_oci(config.hypervisor.uri)
    uri = config.hypervisor.uri if is_used else "oci:"
    with tempfile.TemporaryDirectory(prefix="envd-doctor-") as scratch:
        # Others may enter it, like a daemon's own.
        Path(scratch).chmod(0o711)
        scratch_config = config.model_copy(update={"state_dir": Path(scratch), "hypervisor": HypervisorConfig(uri=uri)})
        try:
            hypervisor = await asyncio.wait_for(open_hypervisor(scratch_config), _OPEN_TIMEOUT_S)
            found = hypervisor.description
            await hypervisor.close()
        except (EnvdError, TimeoutError) as error:
            detail = f"cannot be used: {error or 'no response'}"
            if not is_used:
                return [ok(_NAME, f"not used, and {detail}")]
            return [fail(_NAME, detail, fix="see the message, and docs/backends.md for the other backends")]
    if not is_used:
        return [ok(_NAME, f"not used; --hypervisor {uri} can be: {found}")]
    return [check_limits(found), check_inotify(int(_INOTIFY_INSTANCES.read_text()))]


def check_limits(description: str) -> HostCheck:
    """Check whether machines have limits and a freezer, given the description of the hypervisor."""
    if "control groups cannot" in description or "no hierarchy" in description:
        detail = f"{description}; memory has no limit, and signals instead of the freezer pause machines"
        return warn(_NAME, detail, fix=_DELEGATE)
    if "without limits of memory" in description:
        return warn(_NAME, description, fix=_DELEGATE)
    return ok(_NAME, description)


def check_inotify(instance_count: int) -> HostCheck:
    """Check the host's limit of inotify instances, which the programs of all containers of a user share."""
    desktop_count = instance_count // _INOTIFY_PER_DESKTOP
    detail = f"fs.inotify.max_user_instances={instance_count}: enough for about {desktop_count} desktops in containers"
    if desktop_count >= _MANY_DESKTOPS:
        return ok("inotify", detail)
    return warn("inotify", detail, fix=f"`{as_root('sysctl fs.inotify.max_user_instances=8192')}`")
