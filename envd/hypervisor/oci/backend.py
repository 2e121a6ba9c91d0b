"""Containers in the registry of backends: `oci:`, with the OCI runtime after the colon."""

import re
from collections.abc import Iterable
from typing import Final

from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.hypervisor.backends import Backend
from envd.hypervisor.machine import Capabilities, DiskImage, Hypervisor

CAPABILITIES = Capabilities(
    runs_guests=True,
    runs_files=True,
    task_suite="desktop",
    not_forkable=(
        "containers cannot be copied while they run; use QEMU, the default, for forks, branches and checkpoints, or"
        " reset a group, whose members each run the task's setup"
    ),
)
#: The runtime of `oci:` and `oci`.
DEFAULT_RUNTIME: Final = "runc"

#: A program on PATH, or the path of one.
_URI = re.compile(r"oci(:[A-Za-z0-9._/+-]*)?")


def is_oci(uri: str) -> bool:
    """Return whether machines are containers."""
    return _URI.fullmatch(uri) is not None


async def _open(config: Config, images: Iterable[DiskImage]) -> Hypervisor:
    if config.hypervisor.reaction_ms:
        raise ConfigError("hypervisor.reaction_ms: only drawn desktops have it; remove it, or use --hypervisor fake")
    from envd.hypervisor.oci.hypervisor import OciHypervisor  # noqa: PLC0415

    return await OciHypervisor.open(config, images, runtime=config.hypervisor.uri.partition(":")[2])


BACKEND = Backend(capabilities=CAPABILITIES, open=_open, uris="oci:[RUNTIME]", supports=is_oci)
