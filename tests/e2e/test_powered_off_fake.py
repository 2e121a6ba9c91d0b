"""A task whose goal is to power the guest off, played by its oracle and by an agent that does nothing."""

from contextlib import suppress
from datetime import timedelta

from cuaenv.client import AsyncEnvClient, EnvError, GuestEnded, Wait
from envd.tasks.model import Task
from tests.support.server import serve_fake

TASK = Task.model_validate(
    {
        "task_id": "test/power-off",
        "instruction": "Switch this computer off.",
        "level": 1,
        "checker": {"kind": "powered_off"},
    }
)


async def test_powering_off_solves_a_task_that_asks_for_it_and_nothing_else_does() -> None:
    async with serve_fake(extra_tasks=[TASK]) as server, AsyncEnvClient(server.address) as client:
        async with client.reset(TASK.task_id) as episode:
            # The guest ends before it can report that the command succeeded.
            with suppress(EnvError):
                await episode.run_command(["poweroff"], as_root=True)
            with suppress(GuestEnded):
                await episode.step(Wait(timedelta(seconds=0.1)))
            solved = await episode.evaluate()
            assert (solved.score, solved.guest_end_cause) == (1, "POWER_OFF")
        async with client.reset(TASK.task_id) as episode:
            await episode.step(Wait(timedelta(seconds=0.1)))
            assert (await episode.evaluate()).score == 0
