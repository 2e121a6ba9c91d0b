"""Records who got machines and who did not. Runs that the operator named have their own label, all others share one."""

from collections import Counter
from collections.abc import Iterable, Mapping

from envd.telemetry.metrics import Metrics

#: The label of runs that the operator did not name, that of resets without a label included: clients may invent many.
OTHER_RUNS = "other"


class RunLabels:
    """As many labels as the operator named runs, and one more."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def of(self, run: str) -> str:
        """Return a run's label."""
        return run if run in self._names else OTHER_RUNS

    def counts(self, by_run: Mapping[str, int]) -> Mapping[str, int]:
        """Return counts by label, 0 included, so that no series comes and goes."""
        counts = Counter(dict.fromkeys([*sorted(self._names), OTHER_RUNS], 0))
        for run, count in by_run.items():
            counts[self.of(run)] += count
        return counts


class AdmissionMetrics:
    """An `envd.pool.observer.AdmissionObserver`."""

    def __init__(self, metrics: Metrics, *, runs: RunLabels) -> None:
        self._metrics = metrics
        self._runs = runs

    def admitted(self, *, pool: str, run: str, machine_count: int, wait_s: float) -> None:
        """Record a group that got its machines."""
        label = self._runs.of(run)
        self._metrics.admissions.labels(pool=pool, run=label).inc()
        self._metrics.machines_granted.labels(pool=pool, run=label).inc(machine_count)
        self._metrics.admission_wait.labels(pool=pool, run=label).observe(wait_s)

    def refused(self, *, pool: str, run: str, reason: str) -> None:
        """Record a group that was sent away."""
        self._metrics.refusals.labels(pool=pool, run=self._runs.of(run), reason=reason).inc()
