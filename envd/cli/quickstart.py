"""`envd quickstart`: serves drawn desktops, plays one episode through gRPC, and keeps serving.

It needs neither root nor a guest image. Its addresses are those of `envd serve`, so that the examples of the
documentation work with it.
"""

import asyncio

from cuaenv.actions import Action, action_text
from cuaenv.cli.terminal import out, program
from cuaenv.client import AsyncEnvClient, StepResult
from envd.authoring.playing import play
from envd.base.config import DEFAULT_IMAGE, Config, PoolConfig
from envd.bench.default_tasks import DEFAULT_TASKS
from envd.bench.session import maps_call_errors
from envd.cli.command import command
from envd.cli.own_daemon import own_daemon_options, run_until_signal
from envd.daemon.composition import Daemon, open_daemon
from envd.daemon.suites import load_tasks
from envd.tasks.model import Task

_NEXT = """\
act, in a second terminal in this directory, with {python}:

from cuaenv.client import EnvClient, Click
with EnvClient("{address}") as client, client.reset("{task_id}") as episode:
    print(episode.instruction)
    episode.step(Click(x=100, y=200)).observation.image.save("after.png")

watch:  {console}
list:   {envd} tasks list --envd {address}
play:   {trainer} play {task_id} --envd {address}
Ctrl-C ends it."""


@command(own_daemon_options("listen", "console_listen", log_level="error", is_drawn=True))
def quickstart(settings: Config) -> None:
    """Serve drawn desktops, play one episode, and show what to do next: a minute, without root or an image."""
    pool = PoolConfig(image=DEFAULT_IMAGE, size=4, allow_guest_access=True)
    config = settings.model_copy(
        update={
            "console_listen": settings.console_listen or "127.0.0.1:8080",
            "metrics_listen": "127.0.0.1:0",
            "state_dir": settings.state_dir / "quickstart",
            "hypervisor": settings.hypervisor.model_copy(update={"uri": "fake"}),
            "pools": {DEFAULT_IMAGE: pool},
        }
    )
    run_until_signal(_serve(config))


async def _serve(config: Config) -> None:
    async with open_daemon(config) as daemon:
        task = load_tasks(config).get(DEFAULT_TASKS[daemon.hypervisor.capabilities.task_suite].demo)
        await _play(daemon, task)
        console = f"http://{daemon.console_address}/"
        programs = {name: program(name) for name in ("python", "envd", "trainer")}
        _print("\n" + _NEXT.format(address=daemon.address, console=console, task_id=task.task_id, **programs))
        await asyncio.Event().wait()


async def _play(daemon: Daemon, task: Task) -> None:
    def on_step(actions: tuple[Action, ...], result: StepResult) -> None:
        texts = ", ".join(map(action_text, actions))
        _print(f"  step {result.step_count}: {texts}; settled after {result.observation.settle_ms:.0f} ms")

    async with AsyncEnvClient(daemon.address, token="") as client:
        with maps_call_errors():
            async with client.reset(task.task_id) as episode:
                _print(f"task {task.task_id}: {episode.instruction.strip()}")
                await play(episode, task.oracle, os=task.os, runs_guests=False, on_step=on_step)
                evaluation = await episode.evaluate()
    _print(f"score: {evaluation.score:g}")


def _print(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)
