"""The status of a pool: returned by `ListPools`, exported as metrics, quoted in errors and logs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cuaenv.actions import Tool
from envd.base.telemetry.metrics import PoolSeries
from envd.pool.backoff import BreakerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """One pool at one moment. Two are equal if API clients see no difference."""

    name: str
    image: str
    os: str
    accelerator: str
    """kvm, tcg or fake."""
    capacity: int
    """Most open episodes and reservations at once."""
    resident: int
    """Most machines and reservations at once."""
    idle_count: int
    leased_count: int
    starting_count: int
    dying_count: int
    waiting_count: int
    """Machines and reservations that the queued groups wait for."""
    memory_bytes: int
    """Private dirty bytes of all machines, when last measured."""
    healthy: bool
    """Whether machines start and are destroyed without failures."""
    problem: str
    """Why machines fail to start or to be destroyed, or why the pool waits for memory or disk; empty if all is well."""
    pss_bytes: int = 0
    """Proportional set size of all machines, when last measured: each shared page counts once."""
    template_digest: str = ""
    """Identifies the template that the machines are forked from; empty while there is none."""
    always_running: bool = False
    """Whether guests run between calls."""
    tools: tuple[Tool, ...] = ()
    """What its agents may use in any task."""
    not_forkable: str = ""
    """Why its machines cannot be copied while they run; see `Capabilities`."""
    reserved_count: int = field(default=0, compare=False)
    """Reservations without a machine."""
    parked_count: int = 0
    """Open episodes without a machine, whose state is on the disk."""
    parked_bytes: int = field(default=0, compare=False)
    """Disk space of their states."""
    waiting_by_run: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Queued groups of each run that has any."""
    held_by_run: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Machines and reservations held by each run that holds any."""
    breaker: BreakerState = field(default=BreakerState.CLOSED, compare=False)
    booted_total: int = field(default=0, compare=False)
    """Machines that started, since the daemon started."""
    boot_failure_total: int = field(default=0, compare=False)
    """Machines that failed to start, machines for a template included."""
    lost_total: int = field(default=0, compare=False)
    """Machines that died on their own after they started."""
    template_boot_total: int = field(default=0, compare=False)
    """Templates that were booted."""
    last_start_s: float | None = field(default=None, compare=False)
    """Start time of the newest machine; None before the first."""
    image_expire_unix_s: float | None = field(default=None, compare=False)
    """End of the image's evaluation period; None for never."""

    def __str__(self) -> str:
        reserved = f" | {self.reserved_count} reserved" if self.reserved_count else ""
        problem = f" | {self.problem}" if self.problem else ""
        return (
            f"{self.idle_count} idle | {self.leased_count} leased | {self.starting_count} starting"
            f" | {self.dying_count} dying{reserved} | {self.waiting_count} waiting{problem}"
        )


#: Exported for every pool at each scrape; a new row needs nothing else.
POOL_SERIES: tuple[PoolSeries[PoolStatus], ...] = (
    PoolSeries(
        "envd_pool_machines",
        "Machines of a pool, by state.",
        lambda s: {
            "idle": s.idle_count,
            "leased": s.leased_count,
            "starting": s.starting_count,
            "dying": s.dying_count,
            "reserved": s.reserved_count,
        },
        label="state",
    ),
    PoolSeries(
        "envd_parked_episodes", "Open episodes without a machine: their state is on the disk.", lambda s: s.parked_count
    ),
    PoolSeries("envd_parked_bytes", "Disk space of the states of parked episodes.", lambda s: s.parked_bytes),
    PoolSeries("envd_leases", "Machines leased to episodes.", lambda s: s.leased_count),
    PoolSeries("envd_queue_waiting", "Machines that queued groups wait for.", lambda s: s.waiting_count),
    PoolSeries("envd_queue_groups", "Resets and forks in the queue, by run.", lambda s: s.waiting_by_run, label="run"),
    PoolSeries("envd_run_machines", "Machines held by each run.", lambda s: s.held_by_run, label="run"),
    PoolSeries(
        "envd_pool_breaker",
        "1 for the state of the pool's circuit breaker: closed, open, half_open.",
        lambda s: {state.value: s.breaker is state for state in BreakerState},
        label="state",
    ),
    PoolSeries(
        "envd_machine_memory_bytes", "Private dirty memory of all machines of a pool.", lambda s: s.memory_bytes
    ),
    PoolSeries(
        "envd_machine_pss_bytes",
        "Proportional set size of all machines of a pool, shared memory included.",
        lambda s: s.pss_bytes,
    ),
    PoolSeries("envd_pool_healthy", "1 while the pool's machines start, else 0.", lambda s: s.healthy),
    PoolSeries(
        "envd_machine_starts_total",
        "Machine forks, by outcome.",
        lambda s: {"ready": s.booted_total, "failed": s.boot_failure_total},
        label="outcome",
    ),
    PoolSeries("envd_template_boots_total", "Templates that were booted.", lambda s: s.template_boot_total),
    PoolSeries("envd_last_fork_seconds", "Duration of the most recent fork.", lambda s: s.last_start_s),
    PoolSeries(
        "envd_image_expiry_timestamp_seconds",
        "When the evaluation in a pool's image ends, as Unix time; only for evaluations.",
        lambda s: s.image_expire_unix_s,
    ),
    PoolSeries("envd_machines_lost_total", "Machines that died unexpectedly.", lambda s: s.lost_total),
)
