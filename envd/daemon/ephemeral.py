"""The settings of a private daemon in the process of `envd demo`, `envd bench` and others."""

from typing import Any

from envd.base.config import DEFAULT_IMAGE, Config, PoolConfig, RecordingConfig, SecurityConfig
from envd.hypervisor.backends import backend_of


def ephemeral_config(settings: Config, *, name: str, pool: dict[str, Any], image: str = "") -> Config:
    """Return settings for a daemon with one pool, free ports, and a state directory of its own.

    Args:
        name: Name of the directory below the operator's state directory.
        image: Of the machines, with the settings of the operator's first pool of it; empty for the default image, with
            the settings of the pool of that name.
    """
    own_pool = settings.pools.get(DEFAULT_IMAGE, PoolConfig(image=DEFAULT_IMAGE))
    if image:
        configured = next((each for each in settings.pools.values() if each.image == image), None)
        own_pool = configured or own_pool.model_copy(update={"image": image})
    # Validated again, because defaults depend on other settings.
    own_pool = PoolConfig(**(own_pool.model_dump(exclude_unset=True) | pool))
    # The root of an embedded driver allows one daemon at a time. The templates are shared, so that only the first
    # command or daemon waits for a boot.
    uri = backend_of(settings.hypervisor.uri).private_uri(settings.hypervisor.uri)
    return settings.model_copy(
        update={
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "console_listen": "",
            "compat": (),
            "recording": RecordingConfig(),
            # The command has no token, and must not be rate-limited.
            "security": SecurityConfig(calls_per_second=0),
            "state_dir": settings.state_dir / name,
            "hypervisor": settings.hypervisor.model_copy(update={"uri": uri, "template_dir": settings.template_dir}),
            "pools": {DEFAULT_IMAGE: own_pool},
        }
    )
