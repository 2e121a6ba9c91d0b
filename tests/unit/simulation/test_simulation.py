"""The simulated fleet: its invariants on a few hosts."""

from dataclasses import replace

import pytest

from tests.simulation.fleet import Fleet, simulate
from tests.simulation.host import SimHost
from tests.simulation.scenario import RunLoad, Scenario

SMALL = Scenario(placement="ideal", host_count=2, machines_per_host=16, minutes=10.0, warmup_minutes=5.0)
PLACEMENTS = ["drawn", "ideal"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_at_saturation_the_machines_are_in_use_and_every_machine_is_accounted_for(placement: str) -> None:
    fleet = Fleet(replace(SMALL, placement=placement))
    outcome = fleet.run()
    # A group of 8 waits until 8 of 16 machines are free, so some are always unused.
    assert 0.7 < outcome.utilisation <= 1.0
    assert outcome.unfairness == 0.0
    for host in fleet._hosts:
        check_counts(host)


def check_counts(host: SimHost) -> None:
    assert len(host._machines) <= host.capacity
    assert host.leased_count == sum(group.running_count for group in host.groups)
    assert host.leased_count == sum(host._held.values())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_equal_seeds_give_equal_outcomes(placement: str) -> None:
    scenario = replace(SMALL, placement=placement, load=0.8, minutes=5.0)
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario) != simulate(replace(scenario, seed=2))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_hosts_that_fail_and_drain_lose_work_but_no_group(placement: str) -> None:
    fleet = Fleet(replace(SMALL, placement=placement, host_count=3, host_mtbf_h=0.1, drain_every_s=400.0, seed=3))
    outcome = fleet.run()
    assert outcome.lost_share > 0.0
    assert outcome.episodes_per_h > 0.0
    for host in fleet._hosts:
        check_counts(host)
    open_count = sum(group.running_count for host in fleet._hosts for group in host.groups)
    waiting_count = sum(group.size for group in fleet._waiting)
    assert sum(fleet._open_by_run.values()) == open_count + waiting_count


def test_runs_get_machines_by_weight_where_daemons_decide() -> None:
    runs = (RunLoad(name="a", weight=1.0, sizes=(1, 2)), RunLoad(name="b", weight=3.0, sizes=(1, 2)))
    outcome = simulate(replace(SMALL, placement="ideal", runs=runs, oversubscribed=2.5, minutes=20.0))
    assert outcome.unfairness < 0.15
