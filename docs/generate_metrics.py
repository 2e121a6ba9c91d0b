"""The table of docs/monitoring.md, from the registry of metrics."""

from collections.abc import Iterator

from envd.base.telemetry.host import HostCollector
from envd.base.telemetry.metrics import Metrics
from envd.pool.status import POOL_SERIES


def text() -> str:
    """Return the table: one row per series, by name."""
    rows = ["| series | type | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *sorted(_rows())]) + "\n"


def _rows() -> Iterator[str]:
    metrics = Metrics()
    metrics.watch_pools(lambda: (), POOL_SERIES)
    metrics.registry.register(HostCollector(directories={}, certificates={}, memory=lambda: 0))
    labels = {series.name: ["pool", *([series.label] if series.label else [])] for series in POOL_SERIES}
    for wrapper in vars(metrics).values():
        if names := getattr(wrapper, "_labelnames", ()):
            labels[f"{wrapper._name}_total" if wrapper._type == "counter" else wrapper._name] = list(names)
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found = labels.get(name, getattr(family, "_labelnames", ()))
        yield f"| `{name}` | {family.type} | {', '.join(found)} | {family.documentation} |"
