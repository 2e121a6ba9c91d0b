"""Measures the overhead of a step beyond input and settling, and the same actions performed as peers do.

Our steps use gRPC and return changed tiles. A peer's step has three parts: a command for the guest's HTTP service, a
pause of fixed length, and a screenshot as PNG. It is played on a fork of the same template with the same setup, which
runs throughout.
"""

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import numpy as np
from PIL import Image

from cuaenv.action_codec import to_proto
from cuaenv.actions import Action, Click, Move, PressKeys
from cuaenv.client import AsyncEpisode, Observation
from cuaenv.v1 import env_pb2
from cuaenv.wire import new_id
from envd.bench.report import BenchFailed, BenchReport, Value, exempt_without_guests, figures_of, kib, mib
from envd.bench.session import BenchSession, Steps
from envd.desktop.guestd import GuestdClient
from envd.pool.leased import LeasedMachine
from envd.tasks.model import Task

#: The pause of peers between an action and its screenshot, which `figures.yaml` names.
PEER_PAUSE_S = 2.0
#: The first step wakes the machine, and the first of each kind loads code on both sides.
_WARM_UPS = 6
_PEER_WARM_UPS = 3
#: A policy thinks between two steps, while the machine is paused.
_THINK_S = 0.05
_STEP_TIMEOUT_S = 300.0
_COMMAND_TIMEOUT_S = 60.0
#: Other episodes that are set up at once.
_GROUP_SIZE = 8


#: Parts of a step, in the report's order.
_PARTS = ("overhead", "step", "input", "settle", "resume", "observe", "pause", "wire", "rebuild")
_PEER_PARTS = ("step", "input", "screenshot", "decode")


def script(count: int) -> tuple[Action, ...]:
    """Return actions for an editor that has the focus: click into its text, press a key, move the pointer, repeat."""
    actions: list[Action] = []
    for number in range(count):
        turn = number // 3
        x, y = 220 + 37 * turn % 200, 220 + 23 * turn % 180
        kinds: tuple[Action, ...] = (Click(x, y), PressKeys([chr(ord("a") + turn % 26)]), Move(x + 90, y + 60))
        actions.append(kinds[number % 3])
    return tuple(actions)


def step_count(repetitions: int, peer_repetitions: int) -> int:
    return _WARM_UPS + repetitions + _PEER_WARM_UPS + peer_repetitions


async def measure_step(
    bench: BenchSession, *, task: Task, repetitions: int, peer_repetitions: int, other_count: int = 0, steps: Steps
) -> BenchReport:
    """Play the script over gRPC, then its beginning as peers do.

    Args:
        bench: Its pool can hold two machines, and one for each other episode.
        peer_repetitions: Steps as a peer; none are taken if no guest runs.
    """
    conditions = bench.conditions(
        task=task.task_id, repetitions=repetitions, peer_repetitions=peer_repetitions, other_count=other_count
    )
    steps.begin("setting up")
    async with _others(bench, task.task_id, count=other_count, steps=steps) as others:
        times = await _play(bench, task.task_id, script(_WARM_UPS + repetitions), steps=steps)
        steps.begin("stepping the others")
        other_step_ms = [await _other_step(episode) for episode in others]
        await bench.pool.measure_memory()
        other_bytes = bench.pool.statistics().pss_bytes / other_count if other_count else None
    peer = []
    if bench.runs_guests:
        peer = await _play_as_peers(bench, task, script(_PEER_WARM_UPS + peer_repetitions), steps=steps)
    return step_report(
        conditions,
        times[_WARM_UPS:],
        peer[_PEER_WARM_UPS:],
        other_step_ms=other_step_ms,
        other_bytes=other_bytes if bench.runs_guests else None,
    )


@asynccontextmanager
async def _others(
    bench: BenchSession, task_id: str, *, count: int, steps: Steps
) -> AsyncIterator[Sequence[AsyncEpisode]]:
    """Open the other episodes, in groups, and close them after the block."""
    async with AsyncExitStack() as groups:
        episodes: list[AsyncEpisode] = []
        while len(episodes) < count:
            group = bench.reset_group(task_id, size=min(_GROUP_SIZE, count - len(episodes)))
            episodes += await groups.enter_async_context(group)
            steps.begin(f"{len(episodes)} others are open")
        yield episodes


async def _play(
    bench: BenchSession, task_id: str, actions: Sequence[Action], *, steps: Steps
) -> list[dict[str, float]]:
    times: list[dict[str, float]] = []
    seen: Observation | None = None
    async with bench.reset(task_id, max_steps=len(actions)) as episode:
        for index, action in enumerate(actions):
            step, seen = await _step(episode, action, index=index, seen=seen)
            times.append(step)
            steps.done("stepping")
            await asyncio.sleep(_THINK_S)
    return times


async def _other_step(episode: AsyncEpisode) -> float:
    """Take one step in an episode that was idle; return the milliseconds until its frame was there."""
    begin_s = time.perf_counter()
    await episode.step(Click(220, 220))
    return (time.perf_counter() - begin_s) * 1000


async def _step(
    episode: AsyncEpisode, action: Action, *, index: int, seen: Observation | None
) -> tuple[dict[str, float], Observation]:
    """Take one step; return what is measured of it, for `parts_of`, and its observation. `seen` is the one before."""
    begin_s = time.perf_counter()
    request = env_pb2.StepRequest(
        request_id=new_id(),
        episode_id=episode.episode_id,
        step_index=index,
        actions=[to_proto(action)],
        observation=env_pb2.ObservationOptions(
            encoding=env_pb2.ENCODING_RAW_ZSTD, known_image_id=seen.image_id if seen else ""
        ),
    )
    # Not `AsyncEpisode.step`, which also rebuilds the frame: that is measured separately.
    response = await episode.host.connection.attempt("Step", request, timeout_s=_STEP_TIMEOUT_S)
    step_ms = (time.perf_counter() - begin_s) * 1000
    if errors := [result.error for result in response.action_results if result.error]:
        raise BenchFailed(f"step {index} of episode {episode.episode_id}: {action}: {errors[0]}")
    frame, timings_ms = response.observation.frame, response.timings_ms
    begin_s = time.perf_counter()
    observation = await episode.host.decode(response.observation, seen)
    _ = observation.rgb_HWC
    rebuild_ms = (time.perf_counter() - begin_s) * 1000
    measured = {
        "step": step_ms,
        "input": timings_ms["input"],
        "settle": timings_ms["settle"],
        "resume": timings_ms.get("resume", 0.0),
        "observe": timings_ms["observe"],
        "daemon": timings_ms["total"],
        "rebuild": rebuild_ms,
        "frame_kib": kib(frame.ByteSize()),
    }
    return measured, observation


async def _play_as_peers(
    bench: BenchSession, task: Task, actions: Sequence[Action], *, steps: Steps
) -> list[dict[str, float]]:
    """Play on a machine leased directly from the pool, which runs throughout."""
    steps.begin("setting up for peers")
    async with bench.set_up_machine(task) as leased:
        # Peers have no display connection that costs QEMU time.
        await leased.desktop.close()
        async with _guestd(leased) as guestd:
            times = []
            for action in actions:
                times.append(await _peer_step(guestd, action))
                steps.done("stepping as peers do")
            return times


def _guestd(leased: LeasedMachine) -> GuestdClient:
    if leased.machine.guestd_url is None:
        raise BenchFailed(f"machine {leased.machine_id}: it has no guestd, which peers' steps need")
    return GuestdClient(leased.machine.guestd_url, lost=leased.lost)


async def _peer_step(guestd: GuestdClient, action: Action) -> dict[str, float]:
    """Perform a step as peers do; return the milliseconds of its parts, `_PEER_PARTS`."""
    begin_s = time.perf_counter()
    command = xdotool_command(action)
    result = await guestd.execute(command, timeout_s=_COMMAND_TIMEOUT_S)
    if result.exit_code:
        raise BenchFailed(f"{command} exited with {result.exit_code}: {result.stderr.decode(errors='replace')}")
    acted_s = time.perf_counter()
    await asyncio.sleep(PEER_PAUSE_S)
    paused_s = time.perf_counter()
    png = await guestd.screenshot()
    shot_s = time.perf_counter()
    message = json.dumps({"screenshot": base64.b64encode(png).decode()})
    with Image.open(io.BytesIO(base64.b64decode(json.loads(message)["screenshot"]))) as image:
        np.asarray(image.convert("RGB"))
    end_s = time.perf_counter()
    return {
        "step": (end_s - begin_s) * 1000,
        "input": (acted_s - begin_s) * 1000,
        "screenshot": (shot_s - paused_s) * 1000,
        "decode": (end_s - shot_s) * 1000,
    }


def xdotool_command(action: Action) -> list[str]:
    """Return the command by which a peer performs an action of `script`. Pure. Raises: ValueError: another action."""
    match action:
        case Click(x=x, y=y):
            return ["xdotool", "mousemove", str(x), str(y), "click", "1"]
        case Move(x=x, y=y):
            return ["xdotool", "mousemove", str(x), str(y)]
        case PressKeys(keys=[key]):
            return ["xdotool", "key", key]
        case _:
            raise ValueError(f"{action}: not an action of the script")


def parts_of(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of each of `_PARTS`.

    Args:
        measured: `step`, from the client's call until it has the response; `daemon`, the same as reported by the
            daemon; `observe`, taking the frame and encoding it; `rebuild`, until the client has the pixels; and others.
    """
    step, daemon, settled = measured["step"], measured["daemon"], measured["input"] + measured["settle"]
    return {
        **measured,
        # All time except input and waiting for the guest's reaction to it.
        "overhead": step - settled,
        # The daemon's time after the frame was encoded, mostly for pausing the guest.
        "pause": daemon - measured["resume"] - settled - measured["observe"],
        # Time that the daemon does not count: gRPC both ways, conversion, client.
        "wire": step - daemon,
    }


def step_report(
    conditions: dict[str, object],
    measured: Sequence[Mapping[str, float]],
    peer: Sequence[Mapping[str, float]],
    *,
    other_step_ms: Sequence[float] = (),
    other_bytes: float | None = None,
) -> BenchReport:
    """Return the report; `peer` is empty if no guest runs. Pure."""
    parts = [parts_of(each) for each in measured]
    samples = {f"{part}_ms": [each[part] for each in parts] for part in _PARTS}
    samples["frame_kib"] = [each["frame_kib"] for each in measured]
    samples |= {f"peer_{part}_ms": [each[part] for each in peer] for part in _PEER_PARTS}
    samples["other_step_ms"] = list(other_step_ms)
    ours_ms = median(samples["step_ms"]) + median(samples["rebuild_ms"])
    peer_over_step = median(samples["peer_step_ms"]) / ours_ms if peer else None
    values: dict[str, Value] = {
        "peer_over_step": peer_over_step,
        "other_pss_mib": None if other_bytes is None else mib(other_bytes),
    }
    return BenchReport(
        benchmark="step",
        conditions=conditions,
        figures=figures_of("step", samples, values, exempt=exempt_without_guests(conditions)),
        samples=samples,
    )
