"""What a host carries and costs, calculated from the figures of `envd bench parked`."""

from dataclasses import replace
from functools import partial

import pytest

from envd.bench.parked import ParkedPlan, host_figures

PLAN = ParkedPlan(
    task="desktop/note",
    document="/note.txt",
    episode_count=100,
    resident_count=10,
    step_count=4,
    think_s=19.0,
    price_per_hour=2.0,
)
host_figures_of = partial(
    host_figures,
    core_count=4,
    memory_mib=10_000,
    machine_mib=250,
    disk_mib=50_000,
    parked_mib=10,
    step_s=1.0,
    cpu_s_per_step=0.1,
)


def test_a_host_carries_what_the_scarcest_of_memory_processors_and_disk_allows() -> None:
    found = host_figures_of(PLAN)
    assert found["desktops_by_memory"] == 400  # 40 machines of 10 episodes
    assert found["desktops_by_processors"] == pytest.approx(800)  # 40 steps a second, one each 20 s
    assert found["desktops_by_disk"] == 5000
    assert found["desktops_per_host"] == 400
    assert host_figures_of(PLAN, cpu_s_per_step=1.0)["desktops_per_host"] == 80
    assert host_figures_of(PLAN, parked_mib=500)["desktops_per_host"] == 100


def test_costs_follow_from_the_price_of_the_host() -> None:
    found = host_figures_of(PLAN)
    assert found["dollars_per_desktop_day"] == pytest.approx(48 / 400)
    # 400 desktops take 20 steps a second, and the host costs 2 dollars for 72,000 of them.
    assert found["dollars_per_1000_steps"] == pytest.approx(2 / 72)


def test_costs_need_a_price_and_unmeasured_figures_do_not_limit() -> None:
    unpriced = host_figures_of(replace(PLAN, price_per_hour=0.0), parked_mib=0.0, cpu_s_per_step=0.0)
    assert unpriced["dollars_per_desktop_day"] is unpriced["dollars_per_1000_steps"] is None
    assert unpriced["desktops_by_disk"] is unpriced["desktops_by_processors"] is None
    assert unpriced["desktops_per_host"] == 400
