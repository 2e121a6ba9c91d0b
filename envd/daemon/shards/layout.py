"""Divide a configuration among shards, and refuse what shards cannot serve. Pure, except for the marker file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envd.api.relay.merge import id_prefix
from envd.base.config import Config, HypervisorConfig, PoolConfig, SecurityConfig
from envd.base.errors import ConfigError

#: For calls among a daemon's processes, which the state directory's permissions protect: the limits are on clients.
INNER_SECURITY: Final = SecurityConfig(calls_per_second=0, max_calls_in_flight=1_000_000)
_MARKER: Final = "shards"
_EMBEDDED_ROOT: Final = "qemu:///embed?root="


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of several processes of a daemon, with a part of its machines."""

    index: int
    whole: Config
    """The daemon's settings, with the actual port of `listen`."""

    @property
    def id_prefix(self) -> str:
        """The beginning of the unique part of its ids."""
        return id_prefix(self.index)


def shard_dir(config: Config, index: int) -> Path:
    """Return a shard's state directory."""
    return config.state_dir / f"shard-{index}"


def supervisor_socket(config: Config) -> Path:
    """Return the socket on which shards call the supervisor."""
    return config.state_dir / "supervisor.sock"


def call_socket(config: Config, index: int) -> Path:
    """Return the socket on which the supervisor calls a shard."""
    return shard_dir(config, index) / "calls.sock"


def metrics_socket(config: Config, index: int) -> Path:
    """Return the socket of a shard's metrics."""
    return shard_dir(config, index) / "metrics.sock"


def growth_file(state_dir: Path) -> Path:
    """Return the file in which the shards of a state directory share what their machines have yet to grow into."""
    return state_dir / "growth"


def require_divisible(config: Config) -> None:
    """Check that shards can serve a configuration. Raises: ConfigError."""
    count = config.shards
    if not config.pools:
        raise ConfigError("no pool is configured; pass --pool 2, or add a section [pools.NAME] to the file")
    for name, pool in config.pools.items():
        if pool.capacity < count:
            raise ConfigError(
                f"pool {name}: {pool.capacity} machines cannot be divided among {count} shards; raise its capacity"
                " or lower --shards"
            )
    if config.listen.startswith("unix:"):
        raise ConfigError(f"listen {config.listen}: {count} shards cannot share a Unix socket; listen on a port")
    refused = {
        "console_listen": bool(config.console_listen),
        "compat": bool(config.compat),
        "recording.directory": config.recording.directory is not None,
        "limits.runs: quota": any(run.quota is not None for run in config.limits.runs.values()),
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{setting}: is not available with {count} shards; remove it, or set --shards 1")


def shard_config(config: Config, index: int) -> Config:
    """Return the settings of one shard as a daemon: its part of every pool, below its own state directory.

    `listen` and `security` are those of calls from the supervisor.
    """
    count = config.shards
    return config.model_copy(
        update={
            "shards": 1,
            "listen": f"unix:{call_socket(config, index)}",
            "metrics_listen": f"unix:{metrics_socket(config, index)}",
            "state_dir": shard_dir(config, index),
            "security": INNER_SECURITY,
            "hypervisor": _hypervisor_part(config.hypervisor, index, count),
            "pools": {name: _pool_part(pool, index, count) for name, pool in config.pools.items()},
        }
    )


def _hypervisor_part(hypervisor: HypervisorConfig, index: int, count: int) -> HypervisorConfig:
    """Return settings with directories of the shard's own, and its part of the disk space for templates."""
    name = f"shard-{index}"
    processes = hypervisor.drawing_processes
    uri, templates, memory = hypervisor.uri, hypervisor.template_dir, hypervisor.template_memory_dir
    return hypervisor.model_copy(
        update={
            "uri": f"{uri.rstrip('/')}/{name}" if uri.startswith(_EMBEDDED_ROOT) else uri,
            "template_dir": templates / name if templates else None,
            "template_memory_dir": memory / name if memory else None,
            "template_limit_gib": hypervisor.template_limit_gib / count,
            "drawing_processes": processes and max(1, _part(processes, index, count)),
        }
    )


def _pool_part(pool: PoolConfig, index: int, count: int) -> PoolConfig:
    return pool.model_copy(
        update={
            "size": _part(pool.size, index, count),
            "capacity": _part(pool.capacity, index, count),
            "max_starting": max(1, _part(pool.max_starting, index, count)),
            "queue_limit": _part(pool.queue_limit, index, count),
        }
    )


def _part(total: int, index: int, count: int) -> int:
    """Return the shard's part of a number; the first shards get one more if it is not divisible."""
    return (total + count - 1 - index) // count


def mark_layout(state_dir: Path, *, count: int) -> None:
    """Mark a state directory as that of a running daemon with this number of shards, 1 for a daemon without any.

    The mark of a daemon that was killed stays, and with it the rule that only the same number of shards may recover the
    state: others would not find its machines and episodes. The caller holds the directory's lock.

    Raises:
        ConfigError: A daemon with another number of shards was killed, and its state is not recovered.
    """
    marker = state_dir / _MARKER
    try:
        earlier = marker.read_text(encoding="ascii").strip() if marker.exists() else str(count)
        if earlier != str(count):
            raise ConfigError(
                f"state_dir {state_dir}: its last daemon had --shards {earlier} and did not end cleanly; start and stop"
                f" it once with --shards {earlier}, or choose another --state-dir"
            )
        marker.write_text(f"{count}\n", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{marker}: {error.strerror}; choose another --state-dir") from error


def clear_layout(state_dir: Path) -> None:
    """Remove the mark: the daemon ended, and nothing of it is left."""
    (state_dir / _MARKER).unlink(missing_ok=True)
