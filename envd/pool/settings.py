"""What a pool is made with: its settings, and what the pools of one daemon share."""

from dataclasses import dataclass, field

from pydantic import Field

from envd.base.clock import Clock
from envd.base.config import PoolConfig
from envd.base.store.store import Store
from envd.base.telemetry.metrics import Metrics
from envd.hypervisor.machine import DiskImage, Hypervisor, MachineSpec
from envd.pool.planner import RunShares
from envd.pool.room import HostRoom
from envd.pool.template import TemplateCache

_DEFAULT_SCREEN_PX = (1280, 800)


class PoolParameters(PoolConfig):
    """Capacity, machine size and behaviour of one pool."""

    name: str
    """Unique in the daemon; 1 to 24 of [a-z0-9-], because machine ids begin with it and have at most 32 characters."""
    shares: RunShares = Field(default_factory=dict)
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
        return MachineSpec(
            machine_id=self.name,
            image=image,
            memory_mib=self.memory_mib,
            vcpu_count=self.vcpu_count,
            screen_width_px=width_px,
            screen_height_px=height_px,
            keyboard_layout=self.keyboard_layout,
            trusted_authority=self.trusted_authority,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHost:
    """What the pools of one daemon share."""

    hypervisor: Hypervisor
    """Creates the machines. Its owner closes it, after the pools."""
    templates: TemplateCache = field(default_factory=TemplateCache)
    """Their templates."""
    room: HostRoom = field(default_factory=HostRoom)
    """The host's memory and disk; by default unbounded."""
    metrics: Metrics = field(default_factory=Metrics)
    """Counts admissions and refusals; by default not exported."""
    clock: Clock = field(default_factory=Clock)
    store: Store = field(default_factory=Store)
    """Database for the machines; by default none."""
