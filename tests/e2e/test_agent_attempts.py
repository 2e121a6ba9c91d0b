"""Episodes on lost machines are retried once on a new one; lost again, they are void and never score 0."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from cuaenv.client import Action, AsyncEnvClient, AsyncEpisode, Click, Done, GuestFailed, StepResult, Wait
from envd.tasks.model import Task
from tests.support.clock import until
from tests.support.faulty import Faults
from tests.support.guest_ends import POWER_OFF, end_guests
from tests.support.scripted_replies import ScriptedReplies
from tests.support.server import FakeServer, served_client
from trainer.agent.attempts import play_task
from trainer.agent.groups import GroupMember, Groups
from trainer.agent.loop import AgentEpisode, play_episode
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Conversation, Outcome, Reply, Trajectory

SETTINGS = AgentSettings(max_turns=6, coordinates="pixels")
COUNT = Click(799, 97)  # on a screenshot of 1248x768 px, the size under `AgentSettings.image_max_pixels`


async def only_standby_machines_die(server: FakeServer, count: int) -> None:
    """Wait for the pool's standby machines, which die at their ninth input event; later machines have no faults."""
    async with asyncio.timeout(60):
        while server.pool.statistics().idle_count < count:
            await server.pool.changes.next.wait()
    server.hypervisor.faults = Faults()


def counted(made: list[ScriptedReplies]) -> Callable[[], ScriptedReplies]:
    """Return a factory of models that solve the task; `made` collects them."""

    def new_conversation() -> ScriptedReplies:
        made.append(ScriptedReplies.acting([COUNT] * 3, [COUNT] * 2, [Done()]))
        return made[-1]

    return new_conversation


async def test_an_episode_on_a_lost_machine_is_retried_on_a_new_one() -> None:
    made: list[ScriptedReplies] = []
    async with served_client(size=1, faults=Faults(die_after_inputs=8)) as (server, client):
        await only_standby_machines_die(server, 1)
        trajectory = await play_task(client, "fake/count-to-five", counted(made), settings=SETTINGS)
    assert len(made) == 2
    assert trajectory.outcome is Outcome.TERMINATED
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 1.0
    assert len(trajectory.turns) == 3


@pytest.mark.parametrize("between_steps", [False, True])
async def test_an_episode_whose_guest_ended_is_scored_and_not_retried(
    monkeypatch: pytest.MonkeyPatch, between_steps: bool
) -> None:
    end_guests(monkeypatch, between_steps=between_steps)
    async with served_client(size=1) as (_, client):
        models = iter([ScriptedReplies.acting([POWER_OFF], [COUNT])])
        trajectory = await play_task(client, "fake/count-to-five", lambda: next(models), settings=SETTINGS)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.TERMINATED, "guest_ended")
    assert (trajectory.guest_end_cause, trajectory.attempt_count) == ("POWER_OFF", 1)
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 0.0


@pytest.mark.parametrize("failing", ["step", "evaluate"])
async def test_a_loss_that_the_agent_may_have_caused_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async def hang(*_: object, **__: object) -> None:
        raise GuestFailed("no answer", reason="GUEST_UNRESPONSIVE")

    monkeypatch.setattr(AsyncEpisode, failing, hang)
    made: list[ScriptedReplies] = []
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/count-to-five", counted(made), settings=SETTINGS)
    assert (trajectory.outcome, len(made)) == (Outcome.FAILED, 1)


async def test_a_guest_that_hangs_before_the_agent_acts_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        raise GuestFailed("no answer", reason="GUEST_UNRESPONSIVE")

    monkeypatch.setattr(AsyncEpisode, "evaluate", hang)
    models = iter([ScriptedReplies(["I cannot."] * 6), ScriptedReplies(["I cannot."] * 6)])
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/count-to-five", lambda: next(models), settings=SETTINGS)
    assert (trajectory.outcome, trajectory.attempt_count) == (Outcome.FAILED, 2)


async def test_an_episode_lost_twice_is_void_with_its_error() -> None:
    made: list[ScriptedReplies] = []
    async with served_client(size=1, faults=Faults(die_after_inputs=8)) as (_, client):
        trajectory = await play_task(client, "fake/count-to-five", counted(made), settings=SETTINGS)
    assert len(made) == 2
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "MachineLost")
    assert trajectory.evaluation is None
    assert trajectory.error is not None


async def test_a_failed_setup_is_retried_on_a_new_machine_and_then_void() -> None:
    broken = Task.model_validate(
        {
            "task_id": "mine/broken",
            "level": 1,
            "pool": "fake",
            "instruction": "Do it.",
            "setup": [{"kind": "execute", "argv": ["false"]}],
            "checker": {"kind": "file_text", "path": "/home/user/x", "equals": "x"},
        }
    )
    made: list[ScriptedReplies] = []
    async with served_client(size=1, extra_tasks=[broken]) as (_, client):
        trajectory = await play_task(client, broken.task_id, counted(made), settings=SETTINGS)
    assert len(made) == 2
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "SetupFailed")


async def test_an_unknown_task_is_not_retried() -> None:
    made: list[ScriptedReplies] = []
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/no-such", counted(made), settings=SETTINGS)
    assert len(made) == 1
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "TaskNotFound")
    assert trajectory.evaluation is None


async def play_group(
    client: AsyncEnvClient, task: str, new_conversation: Callable[[], Conversation], *, size: int, **options: Any
) -> list[Trajectory]:
    """Play the members of a group together, as frameworks do."""
    groups = Groups()
    runs = (
        play_task(
            GroupMember(client, groups, group="", size=size, wait_s=60.0),
            task,
            new_conversation,
            settings=SETTINGS,
            **options,
        )
        for _ in range(size)
    )
    return await asyncio.gather(*runs)


async def test_a_group_starts_in_one_state() -> None:
    async with served_client(size=4) as (_, client):
        model = functools.partial(ScriptedReplies.acting, [Done()])
        group = await play_group(client, "fake/append-line", model, size=4)
    assert len({trajectory.origin for trajectory in group}) == 1
    assert len({trajectory.episode_id for trajectory in group}) == 4
    assert [trajectory.outcome for trajectory in group] == [Outcome.TERMINATED] * 4


async def test_members_of_a_group_that_cannot_be_opened_have_trajectories_of_their_own() -> None:
    async with served_client(size=2) as (_, client):
        model = functools.partial(ScriptedReplies.acting, [Done()])
        first, second = await play_group(client, "fake/none", model, size=2, attempts=1)
    assert (first.reason, second.reason) == ("TaskNotFound", "TaskNotFound")
    assert first is not second
    assert first.timings_s is not second.timings_s


async def test_a_lost_member_is_retried_and_the_others_are_unaffected() -> None:
    # Three of the four members send fewer than eight input events.
    made: list[ScriptedReplies] = []
    plans = iter([[COUNT] * 5, [], [], [], [COUNT] * 5])

    def new_conversation() -> ScriptedReplies:
        made.append(ScriptedReplies.acting([*next(plans), Done()]))
        return made[-1]

    async with served_client(size=4, faults=Faults(die_after_inputs=8)) as (server, client):
        await only_standby_machines_die(server, 4)
        group = await play_group(client, "fake/count-to-five", new_conversation, size=4)
        assert len(made) == 5
    scores = [trajectory.evaluation.score for trajectory in group if trajectory.evaluation]
    assert scores == [1.0, 0.0, 0.0, 0.0]


async def test_a_members_machine_is_released_before_the_slowest_member_ends() -> None:
    async with served_client(size=2) as (_, client):
        leased: list[int] = []

        class Slow(ScriptedReplies):
            async def generate(self) -> Reply:
                reply = await super().generate()
                async with asyncio.timeout(60):
                    while not leased or leased[-1] != 1:
                        (pool,) = await client.list_pools()
                        leased.append(pool.leased_count)
                        await asyncio.sleep(0.05)
                return reply

        models = iter([Slow.acting([Done()]), ScriptedReplies.acting([Done()])])
        await play_group(client, "fake/enable", lambda: next(models), size=2)
    assert leased[-1] == 1


async def test_an_episode_whose_time_ends_during_a_step_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, timeout_s=12_345.0)
    limits: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def recording_timeout(delay: float | None) -> asyncio.Timeout:
        made = timeout(delay)
        if delay == settings.timeout_s:
            limits.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", recording_timeout)

    async with served_client(size=1) as (server, client):

        async def play(episode: AgentEpisode, conversation: Conversation) -> Trajectory:
            step = episode.step

            async def step_until_timeout(*actions: Action, **options: Any) -> StepResult:
                running = asyncio.ensure_future(step(*actions, **options))
                served = server.service._registry.get(episode.episode_id)
                if isinstance(actions[0], Wait):
                    await until(served.lock.locked)
                    limits[0].reschedule(asyncio.get_running_loop().time())
                return await running

            monkeypatch.setattr(episode, "step", step_until_timeout)
            return await play_episode(episode, conversation, settings=settings)

        trajectory = await play_task(
            client,
            "fake/count-to-five",
            lambda: ScriptedReplies.acting([COUNT] * 5, [Wait(timedelta(seconds=2))], [Done()]),
            settings=settings,
            play=play,
        )
    assert (trajectory.outcome, trajectory.reason) == (Outcome.TRUNCATED, "time")
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 1.0
