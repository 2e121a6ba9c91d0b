"""Merge the series of several processes into one exposition. Pure."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_LABEL = "shard"


def merge_series(parts: Mapping[str, bytes]) -> bytes:
    """Return the series of all parts, each with the part's name as label `shard` unless it has that label."""
    registry = CollectorRegistry()
    registry.register(_Merged(parts))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, parts: Mapping[str, bytes]) -> None:
        self._parts = parts

    def describe(self) -> list[Metric]:
        """Name no series in advance: they are not known yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all parts."""
        families: dict[str, Metric] = {}
        for shard, text in self._parts.items():
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {_LABEL: shard, **sample.labels}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()
