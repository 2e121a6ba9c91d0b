"""The registry of hypervisor backends, by the scheme of `hypervisor.uri`. No other code asks which backend runs."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from envd.base.config import Config
from envd.hypervisor.machine import Capabilities, DiskImage, Hypervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How to use one kind of hypervisor."""

    capabilities: Capabilities
    open: Callable[[Config, Iterable[DiskImage]], Awaitable[Hypervisor]]
    """Open the hypervisor of the settings for machines that boot from these images. Raises: ConfigError: it cannot run
    on this host with these settings; HypervisorError."""
    uris: str
    """The URIs that it supports, for messages."""
    supports: Callable[[str], bool]
    private_uri: Callable[[str], str] = str
    """Return the URI for another daemon, with a state directory of its own, on the same host."""


#: Module of each backend, with its `BACKEND`; imported when the backend is used.
_MODULES: Final[Mapping[str, str]] = {
    "qemu": "envd.hypervisor.qemu.backend",
    "qemu+unix": "envd.hypervisor.qemu.backend",
    "oci": "envd.hypervisor.oci.backend",
    "fake": "envd.drawn.backend",
}
_DEFAULT_SCHEME: Final = "qemu"


def backend_of(uri: str) -> Backend:
    """Return the backend for a URI; an empty one selects the default. Raises: ValueError: none supports it."""
    module = _MODULES.get(uri.partition(":")[0] or _DEFAULT_SCHEME)
    backend = _load(module) if module else None
    if backend is not None and (not uri or backend.supports(uri)):
        return backend
    supported = dict.fromkeys(_load(each).uris for each in _MODULES.values())
    raise ValueError(f"{uri!r} is not supported; use one of {', '.join(supported)}")


def _load(module: str) -> Backend:
    backend: Backend = import_module(module).BACKEND
    return backend


async def open_hypervisor(config: Config, *, images: Iterable[DiskImage] = ()) -> Hypervisor:
    """Open the backend of `hypervisor.uri`.

    Args:
        config: Settings; `state_dir` must not be in use by another daemon.

    Raises:
        ConfigError: The backend cannot run on this host with these settings.
        HypervisorError: The hypervisor failed.
    """
    return await backend_of(config.hypervisor.uri).open(config, images)
