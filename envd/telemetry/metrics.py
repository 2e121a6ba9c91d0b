"""Every Prometheus series of the daemon. Base units, bounded labels: no episode, machine or client ids.

Counters and histograms are told of events as they happen. Gauges that mirror a pool are read at scrape time from
the snapshot that `Metrics.watch_pools` was given, so a scrape never shows half of a change.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

#: From a fork on KVM to a cold boot under TCG.
_RESET_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
#: From a machine that stands ready to a night in line.
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 7200)
#: From one key press on a still screen to a page of text and a slow redraw.
_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_EVALUATE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_RPC_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SCORE_BUCKETS = (0.0, 0.25, 0.5, 0.75, 0.999, 1.0)
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

#: Names a phase that covers all the others.
TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGauges:
    """One pool at one moment."""

    pool: str
    machine_counts: Mapping[str, int]
    """Machines by state: idle, leased, starting, dying; and reserved, places for machines that are not there yet."""
    waiting_count: int
    """Machines that groups in line wait for."""
    memory_bytes: int
    """What its machines hold alone."""
    pss_bytes: int
    """Its machines' share of the host's memory: what several map counts in parts."""
    healthy: bool
    booted_total: int
    """Machines that were forked and came up, since the daemon started."""
    boot_failure_total: int
    """Machines that did not come up."""
    lost_total: int
    """Machines that died on their own after they came up."""
    template_boot_total: int
    """Templates that were booted."""
    last_start_s: float | None
    """How long the newest fork took; None before the first."""
    queue_lengths: Mapping[str, int] = field(default_factory=dict)
    """Groups in line by run, of a bounded number of runs."""
    held_counts: Mapping[str, int] = field(default_factory=dict)
    """Machines and places in the hands of runs, likewise."""
    breaker: Mapping[str, bool] = field(default_factory=dict)
    """Each state of its circuit breaker, and whether it is the present one."""


class Metrics:
    """The daemon's series, in a registry of their own."""

    def __init__(self, *, process: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._phases: dict[tuple[Histogram, str, str], Histogram] = {}
        if process:
            ProcessCollector(registry=self.registry)
        self.build_info = self._gauge("envd_build_info", "1, labelled with what runs.", "version", "accelerator")
        self.reset_duration = self._histogram(
            "envd_reset_duration_seconds", "Resets that opened episodes, by phase.", _RESET_BUCKETS, "pool", "phase"
        )
        self.step_duration = self._histogram(
            "envd_step_duration_seconds", "Steps that were performed, by phase.", _STEP_BUCKETS, "pool", "phase"
        )
        self.evaluate_duration = self._histogram(
            "envd_evaluate_duration_seconds",
            "Evaluations that gave a score, by phase.",
            _EVALUATE_BUCKETS,
            "pool",
            "phase",
        )
        self.scores = self._histogram("envd_score_ratio", "Scores that episodes were given.", _SCORE_BUCKETS, "pool")
        self.failures = self._counter("envd_failures_total", "Calls answered with a failure, by its reason.", "reason")
        self.admissions = self._counter(
            "envd_admissions_total", "Resets and forks that got their machines, by run.", "pool", "run"
        )
        self.machines_granted = self._counter(
            "envd_machines_granted_total", "Machines and places for them that runs got.", "pool", "run"
        )
        self.admission_wait = self._histogram(
            "envd_admission_wait_seconds", "How long those waited for them.", _WAIT_BUCKETS, "pool", "run"
        )
        self.refusals = self._counter(
            "envd_admission_refusals_total",
            "Resets and forks that got no machines, by reason.",
            "pool",
            "run",
            "reason",
        )
        self.episodes_started = self._counter("envd_episodes_started_total", "Episodes opened.", "pool")
        self.episodes_ended = self._counter(
            "envd_episodes_ended_total", "Episodes that ended, by the state they ended in.", "pool", "state"
        )
        self.rpc_duration = self._histogram(
            "envd_rpc_duration_seconds",
            "Calls answered, by method and gRPC status code.",
            _RPC_BUCKETS,
            "method",
            "code",
        )
        self.loop_lag = Histogram(
            "envd_event_loop_lag_seconds",
            "How much later than asked the event loop woke a sleeper.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )

        self.episode_failures = self._counter(
            "envd_episode_failures_total",
            "Faults of ours that cost a reset or an episode.",
            "pool",
            "operation",
            "reason",
        )
        self.leftovers = self._counter(
            "envd_leftovers_total", "Things that belonged to nothing and were found by the audit, by kind.", "kind"
        )

        self.hypervisor_up = Gauge(
            "envd_hypervisor_up",
            "1 while machines can be made, 0 while libvirt cannot be reached.",
            registry=self.registry,
        )
        self.security_files_stale = self._gauge(
            "envd_security_files_stale",
            "1 while a file of tokens or certificates cannot be used and what it said before still holds, else 0.",
            "setting",
        )

    def watch_pools(self, snapshot: Callable[[], Iterable[PoolGauges]]) -> None:
        """Read pool gauges from `snapshot` at each scrape; it is called on the event loop and must not block."""
        self.registry.register(_PoolCollector(snapshot))

    def observe_phases(self, histogram: Histogram, pool: str, timings_ms: Mapping[str, float]) -> None:
        """Record a call's phases, in milliseconds by name, in a histogram labelled by pool and phase."""
        for phase, duration_ms in timings_ms.items():
            key = (histogram, pool, phase)
            if key not in self._phases:  # to find a series by its labels takes as long as to record in it
                self._phases[key] = histogram.labels(pool=pool, phase=phase)
            self._phases[key].observe(duration_ms / 1000)

    def render(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(self.registry)

    async def measure_loop_lag(self, *, interval_s: float = 0.5) -> None:
        """Measure the event loop's lag until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval_s)
            self.loop_lag.observe(max(0.0, time.monotonic() - before - interval_s))

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class _PoolCollector(Collector):
    def __init__(self, snapshot: Callable[[], Iterable[PoolGauges]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        yield from _families(())

    def collect(self) -> Iterator[Metric]:
        yield from _families(tuple(self._snapshot()))


def _families(pools: tuple[PoolGauges, ...]) -> Iterator[Metric]:
    machines = GaugeMetricFamily("envd_pool_machines", "Machines of a pool, by state.", labels=("pool", "state"))
    leases = GaugeMetricFamily("envd_leases", "Machines leased to episodes.", labels=("pool",))
    waiting = GaugeMetricFamily("envd_queue_waiting", "Machines that are waited for.", labels=("pool",))
    queue = GaugeMetricFamily("envd_queue_groups", "Resets and forks in line, by run.", labels=("pool", "run"))
    held = GaugeMetricFamily("envd_run_machines", "Machines in the hands of each run.", labels=("pool", "run"))
    breaker = GaugeMetricFamily(
        "envd_pool_breaker", "1 for the state that a pool's circuit breaker is in.", labels=("pool", "state")
    )
    memory = GaugeMetricFamily(
        "envd_machine_memory_bytes", "Private dirty memory of a pool's machines together.", labels=("pool",)
    )
    shared = GaugeMetricFamily(
        "envd_machine_pss_bytes",
        "A pool's machines' proportional share of the host's memory, what they have in common included.",
        labels=("pool",),
    )
    fork = GaugeMetricFamily("envd_last_fork_seconds", "How long the newest fork took to come up.", labels=("pool",))
    templates = CounterMetricFamily("envd_template_boots_total", "Templates that were booted.", labels=("pool",))
    healthy = GaugeMetricFamily("envd_pool_healthy", "1 while the pool's machines start, else 0.", labels=("pool",))
    started = CounterMetricFamily(
        "envd_machine_starts_total", "Machines that were forked, by how it went.", labels=("pool", "outcome")
    )
    lost = CounterMetricFamily("envd_machines_lost_total", "Machines that died on their own.", labels=("pool",))
    for pool in pools:
        for state, count in pool.machine_counts.items():
            machines.add_metric((pool.pool, state), count)
        leases.add_metric((pool.pool,), pool.machine_counts.get("leased", 0))
        waiting.add_metric((pool.pool,), pool.waiting_count)
        for run, count in pool.queue_lengths.items():
            queue.add_metric((pool.pool, run), count)
        for run, count in pool.held_counts.items():
            held.add_metric((pool.pool, run), count)
        for state, is_it in pool.breaker.items():
            breaker.add_metric((pool.pool, state), float(is_it))
        memory.add_metric((pool.pool,), pool.memory_bytes)
        shared.add_metric((pool.pool,), pool.pss_bytes)
        templates.add_metric((pool.pool,), pool.template_boot_total)
        if pool.last_start_s is not None:
            fork.add_metric((pool.pool,), pool.last_start_s)
        healthy.add_metric((pool.pool,), float(pool.healthy))
        started.add_metric((pool.pool, "ready"), pool.booted_total)
        started.add_metric((pool.pool, "failed"), pool.boot_failure_total)
        lost.add_metric((pool.pool,), pool.lost_total)
    yield from (
        machines,
        leases,
        waiting,
        queue,
        held,
        breaker,
        memory,
        shared,
        healthy,
        started,
        templates,
        fork,
        lost,
    )
