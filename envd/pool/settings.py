"""How one pool is set up. Checked once, when it is made."""

import re
from dataclasses import dataclass, field

from envd.errors import ConfigError
from envd.guest.observation import SettlePolicy
from envd.pool.backoff import FAILING_AFTER
from envd.pool.fairness import RunShares

#: Leaves room in a machine id, 32 characters at most, for a hyphen and seven more.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """One pool's size, machines and manners."""

    name: str
    """Unique in the daemon; begins its machines' ids, so [a-z0-9-] and at most 24 characters."""
    capacity: int
    """Most machines that exist at once, dying ones included."""
    idle_target: int
    """Machines kept ready beyond demand, where `capacity` allows."""
    max_starting: int = 2
    """Most machines that are forked at the same time: more would only slow each other down."""
    max_idle_s: float = 600.0
    """Age from which on an idle machine beyond `idle_target` is destroyed."""
    queue_limit: int = 256
    """Most groups that may wait for machines; more are told to come back later."""
    shares: RunShares = field(default_factory=RunShares)
    """What each run may have of the machines."""
    boot_timeout_s: float = 600.0
    """Longest time from a running machine to a settled desktop, when the pool's template is booted."""
    backoff_min_s: float = 1.0
    """Pause after a machine that did not come up; doubles with each further one."""
    backoff_max_s: float = 60.0
    """Longest such pause."""
    failing_after: int = FAILING_AFTER
    """Failures in a row after which nobody waits for machines until one comes up."""
    measure_interval_s: float = 15.0
    """How often the machines' memory is measured."""
    memory_mib: int = 1024
    expected_memory_mib: int = 256
    """What a machine is expected to hold alone when it has been used; the host's memory bounds machines by it."""
    always_running: bool = False
    """Whether a guest runs on between uses, once it has been used."""
    linger_s: float = 0.0
    """How long a guest runs on after each use, where it does not always."""
    task_templates: int = 8
    """Most states of tasks that are kept frozen; 0 for none."""
    vcpu_count: int = 2
    screen_width_px: int = 1280
    screen_height_px: int = 800
    allow_guest_access: bool = False
    """Whether clients may read and write guest files and run guest commands."""
    settle: SettlePolicy = field(default_factory=SettlePolicy)
    """When a screen counts as settled, unless a request says otherwise."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"pool name {self.name!r} is not 1 to 24 of a-z, 0-9 and inner hyphens")
        if self.capacity < 1:
            raise ConfigError(f"pool {self.name!r}: capacity {self.capacity} is below 1")
        if not 0 <= self.idle_target <= self.capacity:
            raise ConfigError(
                f"pool {self.name!r}: idle_target {self.idle_target} is not in [0, {self.capacity}], its capacity"
            )
        if self.max_starting < 1:
            raise ConfigError(f"pool {self.name!r}: max_starting {self.max_starting} is below 1, so none could start")
        if self.queue_limit < 0:
            raise ConfigError(f"pool {self.name!r}: queue_limit {self.queue_limit} is below 0")
        if self.failing_after < 1:
            raise ConfigError(f"pool {self.name!r}: failing_after {self.failing_after} is below 1")
        if self.expected_memory_mib < 1:
            raise ConfigError(f"pool {self.name!r}: expected_memory_mib {self.expected_memory_mib} is below 1")
        if self.task_templates < 0:
            raise ConfigError(f"pool {self.name!r}: task_templates {self.task_templates} is below 0")
        if not 0 < self.backoff_min_s <= self.backoff_max_s:
            raise ConfigError(
                f"pool {self.name!r}: backoff from {self.backoff_min_s:g} s to {self.backoff_max_s:g} s is no range"
            )
