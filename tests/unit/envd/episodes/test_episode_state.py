"""The calls that an episode's state allows, and its transitions."""

import itertools
from unittest.mock import AsyncMock

import pytest

from cuaenv.actions import Done, Fail
from envd.base.errors import EpisodeNotFound
from envd.episodes.episode import Episode, Lease
from envd.episodes.ledger import Ledger
from envd.episodes.progress import EpisodeState, Progress
from envd.hypervisor.machine import MachineSpec
from envd.pool.leased import FrozenDesktop, LeasedMachine
from envd.tasks.model import Task
from tests.support.clock import ManualClock
from tests.support.episode_values import episode_spec
from tests.support.stubs import IMAGE, StubHypervisor, StubMachine, StubSnapshot, blank_view


@pytest.fixture
def episode() -> Episode:
    """Return an episode with one step left."""
    hypervisor, clock = StubHypervisor(), ManualClock()
    spec = MachineSpec(machine_id="desktop-0a", image=IMAGE)
    snapshot = StubSnapshot(spec, frame_id="f1", notes={}, hypervisor=hypervisor)
    frozen = FrozenDesktop(snapshot=snapshot, view=blank_view(1280, 800))
    machine = StubMachine(spec, hypervisor, snapshot=snapshot)
    return Episode(
        spec=episode_spec(max_steps=3),
        progress=Progress(step_count=2),
        task=Task(task_id="suite/name", instruction="Do nothing.", level=1, infeasible=True),
        machine=LeasedMachine(machine=machine, desktop=hypervisor.desktop(machine, view=frozen.view), frozen=frozen),
        lease=Lease(ttl_s=300.0, now_s=clock.monotonic()),
        requests=Ledger(clock=clock, abandoned=lambda: EpisodeNotFound("gone"), close_group=AsyncMock()),
    )


ALLOWED = {
    (EpisodeState.ACTIVE, EpisodeState.TERMINATED),
    (EpisodeState.ACTIVE, EpisodeState.TRUNCATED),
    (EpisodeState.ACTIVE, EpisodeState.FAILED),
    (EpisodeState.TERMINATED, EpisodeState.FAILED),
    (EpisodeState.TRUNCATED, EpisodeState.FAILED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(EpisodeState, EpisodeState)))
def test_only_documented_transitions_are_allowed(episode: Episode, before: EpisodeState, after: EpisodeState) -> None:
    if before is not EpisodeState.ACTIVE:
        episode.end(before, "EARLIER")
    if (before, after) in ALLOWED:
        episode.end(after, "NOW")
        assert (episode.progress.state, episode.progress.end_reason) == (after, "NOW")
    else:
        with pytest.raises(RuntimeError, match=f"cannot become {after.value}"):
            episode.end(after, "NOW")
        assert episode.progress.state is before


@pytest.mark.parametrize(("action", "reason"), [(Done(answer="42"), "AGENT_DONE"), (Fail(), "AGENT_FAIL")])
def test_done_and_fail_terminate_also_in_the_last_step(episode: Episode, action: Done | Fail, reason: str) -> None:
    assert episode.count_step(action)
    assert (episode.progress.state, episode.progress.end_reason) == (EpisodeState.TERMINATED, reason)
    assert episode.progress.last_action == action
    assert repr(episode) == f"<Episode ep-1 terminated ({reason}) of suite/name on desktop-0a, step 3 of 3>"
