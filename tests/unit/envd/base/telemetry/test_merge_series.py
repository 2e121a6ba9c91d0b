"""The series of several processes in one exposition."""

from envd.base.telemetry.merge import merge_series
from envd.base.telemetry.metrics import Metrics


def test_series_of_all_parts_have_the_name_of_their_part() -> None:
    first, second = Metrics(), Metrics()
    first.failures.labels(reason="BUG").inc(2)
    second.failures.labels(reason="BUG").inc(3)
    second.step_duration.labels(pool="a", phase="total").observe(0.2)
    lines = merge_series({"0": first.render(), "1": second.render()}).decode().splitlines()
    assert 'envd_failures_total{reason="BUG",shard="0"} 2.0' in lines
    assert 'envd_failures_total{reason="BUG",shard="1"} 3.0' in lines
    assert 'envd_step_duration_seconds_bucket{le="0.25",phase="total",pool="a",shard="1"} 1.0' in lines
    assert lines.count("# TYPE envd_failures_total counter") == 1


def test_a_series_that_names_a_shard_keeps_its_label() -> None:
    supervisor = Metrics()
    supervisor.shard_up.labels(shard="1").set(1)
    assert 'envd_shard_up{shard="1"} 1.0' in merge_series({"supervisor": supervisor.render()}).decode().splitlines()
