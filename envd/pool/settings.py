"""Settings of one pool. `PoolConfig` has validated what operators may set."""

from dataclasses import dataclass, field

from envd.guest.observation import SettlePolicy
from envd.hypervisor.machine import DiskImage, MachineSpec
from envd.pool.backoff import FAILING_AFTER
from envd.pool.fairness import RunShares


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Capacity, machine size and behaviour of one pool."""

    name: str
    """Unique in the daemon; 1 to 24 of [a-z0-9-], because machine ids begin with it and have at most 32 characters."""
    capacity: int
    """Most machines at once, dying ones included."""
    idle_target: int
    """Machines kept ready beyond demand, where `capacity` allows; at most `capacity`."""
    max_starting: int = 2
    """Most machines forked at the same time: more would only slow each other down."""
    max_idle_s: float = 600.0
    """Age at which an idle machine beyond `idle_target` is destroyed."""
    queue_limit: int = 256
    """Most queued groups; further ones are refused with a retry hint."""
    shares: RunShares = field(default_factory=RunShares)
    """Weights and quotas of runs."""
    boot_timeout_s: float = 600.0
    """Longest time from a running machine to a settled desktop, when the pool's template is booted."""
    backoff_min_s: float = 1.0
    """Pause after a machine that failed to start; doubles with each further failure."""
    backoff_max_s: float = 60.0
    """Longest such pause."""
    failing_after: int = FAILING_AFTER
    """Failures in a row after which the pool refuses groups until a machine starts."""
    measure_interval_s: float = 15.0
    """Time between two measurements of the machines' memory."""
    memory_mib: int = 1024
    expected_memory_mib: int = 256
    """Private memory that a used machine is expected to reach; the host's memory bounds machines by it."""
    disk_quota_mib: int = 8192
    """Disk of the host that a machine may use; one that uses more is lost."""
    always_running: bool = False
    """Whether a guest keeps running between uses, after the first one."""
    linger_s: float = 0.0
    """How long a guest keeps running after each use, unless it always runs."""
    task_templates: int = 8
    """Most task states that are kept frozen; 0 for none."""
    vcpu_count: int = 2
    screen_width_px: int = 1280
    screen_height_px: int = 800
    allow_guest_access: bool = False
    """Whether clients may read and write guest files and run guest commands."""
    settle: SettlePolicy = field(default_factory=SettlePolicy)
    """The rule by which a screen counts as settled, unless a request overrides it."""

    def machine_spec(self, image: DiskImage) -> MachineSpec:
        """Return the pool's machines, with the pool's name as their id."""
        return MachineSpec(
            machine_id=self.name,
            image=image,
            memory_mib=self.memory_mib,
            vcpu_count=self.vcpu_count,
            screen_width_px=self.screen_width_px,
            screen_height_px=self.screen_height_px,
        )
