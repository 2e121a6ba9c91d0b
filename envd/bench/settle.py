"""Measures how long steps wait for the screen, and how often it changes after the frame that they return.

Plays the oracles of tasks on machines that run throughout and records every step for seconds longer than any policy
waits. All policies are then replayed over the same recordings. A *late change* is content that changes after the frame
which a step returns as settled; a caret that blinks is not content.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from statistics import median

from cuaenv.actions import Action, Done, Fail, Wait
from cuaenv.results import CommandResult
from envd.authoring.playing import wait_until_met
from envd.base.config import SettlePolicy
from envd.bench.report import BenchFailed, BenchReport, Value, figures_of, percentile
from envd.bench.session import BenchSession, Steps
from envd.bench.settle_recording import StepRecorder, StepRecording, replay_settling
from envd.pool.leased import LeasedMachine
from envd.tasks.model import Task
from envd.tasks.oracle import Input, WaitFor, without_target
from envd.tasks.queries import Query
from envd.tasks.replay import replay

_QUERY_TIMEOUT_S = 120.0
_QUERY_INTERVAL_S = 0.5
_IDLE_MS = (25, 50, 75, 100, 150, 200)
_QUIET_MS = (50, 100, 150, 200, 300, 500, 1000)


async def measure_settle(bench: BenchSession, tasks: Sequence[Task], *, watch_s: float, steps: Steps) -> BenchReport:
    """Record the oracles of tasks, each on a machine of its own, and replay the policies.

    Args:
        bench: Its pool holds one machine at a time.
        watch_s: For how long after a step's frame changes count as late.
    """
    recorded: list[StepRecording] = []
    for task in tasks:
        recorded += await record_task(bench, task, watch_s=watch_s, steps=steps)
    if not recorded:
        raise BenchFailed("none of the tasks has a step with input; name tasks with an oracle")
    conditions = bench.conditions(tasks=[task.task_id for task in tasks], watch_s=watch_s)
    return await settle_report(conditions, recorded, policy=bench.pool.settings.settle, watch_s=watch_s)


async def record_task(bench: BenchSession, task: Task, *, watch_s: float, steps: Steps) -> list[StepRecording]:
    """Play a task's oracle on a new machine; return the recordings of its steps with input."""
    steps.begin(f"setting up {task.task_id}")
    async with bench.set_up_machine(task) as leased:
        recorder = StepRecorder(
            leased.desktop, leased.machine, watch_s=watch_s, ignored=bench.pool.settings.settle.ignored_regions
        )
        await _play(leased, task, recorder, steps=steps)
        return recorder.steps()


async def _play(leased: LeasedMachine, task: Task, recorder: StepRecorder, *, steps: Steps) -> None:
    desktop = leased.desktop

    async def run(query: Query) -> CommandResult:
        return await desktop.run(query.argv, as_root=query.as_root, timeout_s=_QUERY_TIMEOUT_S)

    async def wait_for(condition: WaitFor) -> str:
        await wait_until_met(condition, os=task.os, run=run, let_run=lambda: asyncio.sleep(_QUERY_INTERVAL_S))
        return (await desktop.frame(refresh=True)).frame_id

    async def step(inputs: tuple[Input, ...]) -> str:
        actions = tuple(map(without_target, inputs))
        steps.done(f"recording {task.task_id}")
        before = (await desktop.frame(refresh=True)).image
        until_last = _without_last_waits(actions)
        for action in until_last or actions:
            outcome = await desktop.act(action)
            if outcome.error:
                raise BenchFailed(f"task {task.task_id}: {action}: {outcome.error}")
        if not until_last:
            return (await desktop.frame(refresh=True)).frame_id
        return (await recorder.record(until_last, input_s=time.monotonic(), before=before)).image_id

    first_frame_id = (await desktop.frame(refresh=True)).frame_id
    if leased.machine.processor_s() is None:
        await replay(task.oracle, first_frame_id=first_frame_id, step=step, wait_for=wait_for, patience_s=())
    else:
        await replay(task.oracle, first_frame_id=first_frame_id, step=step, wait_for=wait_for)


def _without_last_waits(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return the actions up to the last input: a wait after it would hide how the screen settles."""
    inputs = [index for index, action in enumerate(actions) if not isinstance(action, Wait | Done | Fail)]
    return actions[: inputs[-1] + 1] if inputs else ()


async def judge(
    recorded: Sequence[StepRecording], policy: SettlePolicy, *, watch_s: float
) -> tuple[list[float], float, float]:
    """Replay one policy over all recordings.

    Returns:
        The milliseconds that each step settled, the share of the steps with a late change, and that of the steps which
        did not settle.
    """
    settle_ms: list[float] = []
    late_count = unsettled_count = 0
    for step in recorded:
        result, at_s = await replay_settling(step, policy)
        settle_ms.append(result.settle_ms)
        unsettled_count += not result.settled
        late_count += result.settled and step.has_change_after(at_s, watch_s=watch_s)
    return settle_ms, late_count / len(recorded), unsettled_count / len(recorded)


async def settle_report(
    conditions: Mapping[str, object], recorded: Sequence[StepRecording], *, policy: SettlePolicy, watch_s: float
) -> BenchReport:
    """Replay the policies over the recordings and return the report."""

    async def with_times(**times_ms: int) -> tuple[list[float], float, float]:
        return await judge(recorded, policy.model_copy(update=times_ms), watch_s=watch_s)

    settle_ms, late_change_rate, unsettled_rate = own = await with_times()
    curve = {f"fixed {quiet_ms} ms": await with_times(quiet_ms=quiet_ms, idle_ms=0) for quiet_ms in _QUIET_MS}
    fixed_settle_ms, fixed_late_change_rate, _ = curve["fixed 300 ms"]
    curve |= {f"idle {idle_ms} ms": await with_times(idle_ms=idle_ms) for idle_ms in _IDLE_MS}
    samples = {"settle_ms": settle_ms, "fixed_settle_ms": fixed_settle_ms}
    values: dict[str, Value] = {
        "steps": len(recorded),
        "late_change_rate": late_change_rate,
        "fixed_late_change_rate": fixed_late_change_rate,
        "unsettled_rate": unsettled_rate,
    }
    return BenchReport(
        benchmark="settle",
        conditions=dict(conditions),
        figures=figures_of("settle", samples, values),
        samples=samples,
        tables={
            "curve": [
                {
                    "policy": name,
                    "late_change_rate": late_rate,
                    "settle_ms_p50": median(times_ms),
                    "settle_ms_p90": percentile(times_ms, 90) or 0.0,
                }
                for name, (times_ms, late_rate, _) in {"pool": own, **curve}.items()
            ]
        },
    )
