"""Prometheus series and the endpoint that serves them."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from envd.base.clock import LoopLag
from envd.base.telemetry.host import HostCollector
from envd.base.telemetry.metrics import Metrics
from envd.pool.backoff import BreakerState
from envd.pool.status import POOL_SERIES, PoolStatus
from tests.support.docs import program
from tests.support.stub_episodes import pool_info


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return every sample by name and label values, in the order of the label names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def pool() -> PoolStatus:
    counts = {"reserved_count": 1, "waiting_count": 3, "memory_bytes": 1 << 20, "pss_bytes": 3 << 20}
    totals = {"booted_total": 5, "boot_failure_total": 1, "lost_total": 2, "template_boot_total": 1}
    return pool_info(4, name="desktop", idle=1, leased=2, last_start_s=0.5, **counts, **totals)


def test_pool_gauges_show_the_instant_of_the_scrape() -> None:
    metrics = Metrics()
    now = [pool()]
    metrics.watch_pools(lambda: [("desktop", each) for each in now], POOL_SERIES)
    assert samples(metrics)["envd_pool_machines", "desktop", "leased"] == 2
    now[0] = replace(pool(), leased_count=0)
    after = samples(metrics)
    assert after["envd_pool_machines", "desktop", "leased"] == 0
    assert after["envd_leases", "desktop"] == 0
    assert after["envd_queue_waiting", "desktop"] == 3
    assert after["envd_machine_memory_bytes", "desktop"] == 1 << 20
    assert after["envd_machine_pss_bytes", "desktop"] == 3 << 20
    assert after["envd_pool_machines", "desktop", "reserved"] == 1
    assert after["envd_template_boots_total", "desktop"] == 1
    assert after["envd_last_fork_seconds", "desktop"] == 0.5
    assert after["envd_pool_healthy", "desktop"] == 1
    assert after["envd_machine_starts_total", "failed", "desktop"] == 1
    assert after["envd_machines_lost_total", "desktop"] == 2
    metrics = Metrics()
    metrics.watch_pools(lambda: [("desktop", replace(pool(), last_start_s=None))], POOL_SERIES)
    assert ("envd_last_fork_seconds", "desktop") not in samples(metrics)


def test_episode_events_are_counted_by_pool() -> None:
    metrics = Metrics()
    metrics.episodes_opened(pool="p", run="", count=4, timings_ms={"acquire": 1.0, "total": 2.0})
    metrics.step_done(pool="p", timings_ms={"input": 5.0})
    metrics.episode_evaluated(pool="p", score=1.0, timings_ms={"total": 10.0})
    metrics.episode_ended(pool="p", run="", state="terminated")
    metrics.episode_failed(pool="p", operation="step", reason="MACHINE_LOST")
    shown = samples(metrics)
    assert shown["envd_episodes_started_total", "p", "other"] == 4
    assert shown["envd_reset_duration_seconds_count", "acquire", "p"] == 1
    assert shown["envd_step_duration_seconds_sum", "input", "p"] == pytest.approx(0.005)
    assert shown["envd_evaluate_duration_seconds_count", "total", "p"] == 1
    assert shown["envd_score_ratio_sum", "p"] == 1.0
    assert shown["envd_episodes_ended_total", "p", "other", "terminated"] == 1
    assert shown["envd_episode_failures_total", "step", "p", "MACHINE_LOST"] == 1


def test_admissions_are_counted_by_configured_run_and_one_label_for_all_others() -> None:
    metrics = Metrics(run_names=["main"])
    metrics.group_admitted(pool="p", run="main", machine_count=4, wait_s=2.5)
    for number in range(1000):
        metrics.group_admitted(pool="p", run=f"invented-{number}", machine_count=1, wait_s=0.0)
        metrics.group_refused(pool="p", run=f"invented-{number}", reason="too_late")
    metrics.group_admitted(pool="p", run="", machine_count=1, wait_s=0.0)
    shown = samples(metrics)
    assert shown["envd_admissions_total", "p", "main"] == 1
    assert shown["envd_machines_granted_total", "p", "main"] == 4
    assert shown["envd_admission_wait_seconds_sum", "p", "main"] == 2.5
    assert shown["envd_admissions_total", "p", "other"] == 1001
    assert shown["envd_admission_refusals_total", "p", "too_late", "other"] == 1000
    assert not [labels for _, *labels in shown if any("invented" in label for label in labels)]


def test_queue_holders_and_breaker_show_the_moment_of_the_scrape() -> None:
    metrics = Metrics(run_names=["main", "sweep"])
    status = replace(pool(), waiting_by_run={"main": 2, "x": 1, "y": 3}, held_by_run={"": 5}, breaker=BreakerState.OPEN)
    metrics.watch_pools(lambda: [("desktop", status)], POOL_SERIES)
    shown = samples(metrics)
    assert [shown["envd_queue_groups", "desktop", run] for run in ("main", "sweep", "other")] == [2, 0, 4]
    assert [shown["envd_run_machines", "desktop", run] for run in ("main", "sweep", "other")] == [0, 0, 5]
    assert [shown["envd_pool_breaker", "desktop", state] for state in ("closed", "open", "half_open")] == [0, 1, 0]


def test_two_daemons_in_one_process_do_not_share_series() -> None:
    one, other = Metrics(), Metrics()
    one.failures.labels(reason="MACHINE_LOST").inc()
    assert ("envd_failures_total", "MACHINE_LOST") in samples(one)
    assert ("envd_failures_total", "MACHINE_LOST") not in samples(other)


async def test_a_blocked_loop_shows_as_lag() -> None:
    metrics = Metrics()
    lag = LoopLag(interval_s=0.001)
    lag.listen(metrics.loop_lag.observe)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251 - blocking the loop is what is measured
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert samples(metrics)["envd_event_loop_lag_seconds_sum",] >= 0.018


def series_names() -> Iterator[str]:
    metrics = Metrics()
    metrics.watch_pools(lambda: (), POOL_SERIES)
    return (family.name for family in text_string_to_metric_families(metrics.render().decode()))


def test_every_series_is_on_the_page_of_metrics_with_our_prefix_and_base_units() -> None:
    metrics = Metrics()
    metrics.watch_pools(lambda: (), POOL_SERIES)
    metrics.registry.register(HostCollector(directories={}, certificates={}, memory=lambda: 0))
    names = [
        f"{family.name}_total" if family.type == "counter" else family.name for family in metrics.registry.collect()
    ]
    table = program("generate_metrics").text()
    assert len(names) > 15
    assert [name for name in names if f"| `{name}` |" not in table] == []
    assert "| `envd_losses_total` | counter | pool, owner | Machines" in table
    names = list(series_names())
    assert "envd_step_duration_seconds" in names
    assert [name for name in names if not name.startswith("envd_")] == []
    assert [name for name in names if name.endswith(("_ms", "_mib", "_minutes"))] == []
