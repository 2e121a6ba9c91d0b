"""A side of `envd tasks parity`: OSWorld's own `DesktopEnv`, with its own boot, pauses and evaluators.

Its machines boot from the same image as ours, one for each script. `envd.bench.peer_program` has the flow.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from cuaenv.cli.terminal import progress
from envd.authoring.parity.playing import PlannedScript, PlayedScript, SideName, add_screen, result_of
from envd.base.config import Config
from envd.base.errors import EnvdError
from envd.bench.episodes import task_file
from envd.bench.episodes_peer import PeerEpisode, play_as_peer
from envd.bench.session import BenchSession, Steps, open_bench

#: An emulated guest may boot for 15 minutes, and evaluators of OSWorld have no limit of their own.
_SCRIPT_TIMEOUT_S = 3600.0
#: The default of `DesktopEnv.step`.
STEP_PAUSE_S = 2.0


async def play_side_in_desktop_env(
    config: Config,
    planned: Sequence[PlannedScript],
    *,
    python: Path,
    tasks: Path,
    side: SideName,
    screens: Path,
    parallel_count: int,
    on_result: Callable[[PlayedScript], None],
) -> None:
    """Play scripts, `parallel_count` at once. One that fails does not stop the others.

    Args:
        config: Of the daemon that makes the machines; see `parity_config`.
        python: OSWorld's.
        tasks: OSWorld's directory of tasks.
    """
    slots = asyncio.Semaphore(parallel_count)
    with progress(f"parity {side}") as report:
        steps = Steps(report, len(planned))
        async with open_bench(config, steps=steps) as bench:

            async def play_one(each: PlannedScript) -> None:
                async with slots:
                    on_result(await _play(bench, each, python=python, tasks=tasks, side=side, screens=screens))
                steps.done(each.task.task_id)

            async with asyncio.TaskGroup() as group:
                for each in planned:
                    group.create_task(play_one(each), name=f"parity:{each.task.task_id}")


async def _play(
    bench: BenchSession, planned: PlannedScript, *, python: Path, tasks: Path, side: SideName, screens: Path
) -> PlayedScript:
    spec = bench.template.spec
    episode = PeerEpisode(
        task=task_file(tasks, planned.task.task_id.partition("/")[2]),
        actions=planned.script.calls_on((spec.screen_width_px, spec.screen_height_px)),
        awaits_first_change=False,
    )
    try:
        async with asyncio.timeout(_SCRIPT_TIMEOUT_S):
            [played] = await play_as_peer(
                bench, python, [episode], think_s=0, step_pause_s=STEP_PAUSE_S, on_episode=lambda: None
            )
    except TimeoutError:
        return result_of(planned, side, detail=f"not finished after {_SCRIPT_TIMEOUT_S:g} s")
    except EnvdError as error:
        return result_of(planned, side, detail=str(error))
    names = tuple(add_screen(screens, base64.b64decode(each)) for each in played.screens)
    return result_of(planned, side, score=played.score, screens=names)
