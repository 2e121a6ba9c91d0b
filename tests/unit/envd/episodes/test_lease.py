"""When an episode's lease expires."""

import pytest

from envd.episodes.episode import MAX_CALL_S, Lease


@pytest.fixture
def lease() -> Lease:
    return Lease(ttl_s=30.0, now_s=0.0)


def test_a_renewed_lease_restarts_and_can_change_its_ttl_permanently(lease: Lease) -> None:
    lease.renew(5.0)
    assert lease.expire_s == 35.0
    lease.renew(10.0, ttl_s=60.0)
    assert lease.expire_s == 70.0
    lease.renew(20.0)
    assert lease.expire_s == 80.0


def test_a_running_call_keeps_its_lease(lease: Lease) -> None:
    lease.begin_call()
    lease.begin_call()
    assert not lease.has_expired(1000.0)
    lease.end_call(1000.0, renews=False)
    assert not lease.has_expired(1000.0)
    lease.end_call(1000.0, renews=False)
    assert lease.has_expired(1000.0)


def test_a_lease_is_extended_by_the_time_in_which_no_call_could_renew_it() -> None:
    early, late, expired = (Lease(ttl_s=ttl_s, now_s=0.0) for ttl_s in (30.0, 10.25, 9.0))
    # Nothing ran from 10 s to 35 s.
    for lease in (early, late, expired):
        lease.extend(25.0, now_s=35.0)
    assert (early.expire_s, late.expire_s, expired.expire_s) == (55.0, 36.0, 34.0)


def test_a_machine_may_be_reclaimed_later_while_a_call_runs(lease: Lease) -> None:
    assert lease.reclaim_s == 30.0
    lease.begin_call()
    assert lease.reclaim_s == 30.0 + MAX_CALL_S
