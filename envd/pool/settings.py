"""Settings of one pool: those of the operator, and those that only the daemon and tests set."""

from cuaenv.copying import copied
from envd.base.config import PoolConfig
from envd.hypervisor.machine import DiskImage, MachineSpec
from envd.pool.fairness import RunShares

_DEFAULT_SCREEN_PX = (1280, 800)


class PoolSettings(PoolConfig):
    """Capacity, machine size and behaviour of one pool."""

    name: str
    """Unique in the daemon; 1 to 24 of [a-z0-9-], because machine ids begin with it and have at most 32 characters."""
    shares: RunShares = RunShares()
    max_idle_s: float = 600.0
    """Age at which an idle machine beyond `size` is destroyed."""
    backoff_min_s: float = 1.0
    """Pause after a machine that failed to start; doubles with each further failure."""
    backoff_max_s: float = 60.0
    """Longest such pause."""
    measure_interval_s: float = 15.0
    """Time between two measurements of the machines' memory."""
    trusted_authority: str = ""
    """See `MachineSpec`."""
    linger_s: float = 0.0
    """How long a guest keeps running after each use, unless it always runs."""

    def machine_spec(self, image: DiskImage) -> MachineSpec:
        """Return the pool's machines, with the pool's name as their id."""
        width_px, height_px = self.screen or _DEFAULT_SCREEN_PX
        size = {"screen_width_px": width_px, "screen_height_px": height_px}
        return copied(MachineSpec, self, machine_id=self.name, image=image, **size)
