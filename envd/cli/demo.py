"""`envd demo`: show on real machines that a task can be solved, and that doing nothing does not solve it.

It serves a pool of two in its own process, drives two episodes over real gRPC, and leaves the evidence in a directory.
"""

import asyncio
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table

from envd.api.driver import EpisodeDriver, ResetResponse, failures_explained
from envd.cli.daemon import Daemon, open_daemon
from envd.cli.demo_report import CheckRecord, DemoDirectory, DemoReport, EpisodeRecord, StepRecord
from envd.cli.image import stop_on_sigterm
from envd.cli.options import Accelerator, CacheDir, ConfigFile, Hypervisor, Json, StateDir, load_config
from envd.cli.output import EXIT_FAILED, emit_json, err, friendly, out, progress
from envd.cli.serve import is_ready, progress_line
from envd.cli.suites import load_tasks
from envd.config import DEFAULT_IMAGE, Config, PoolConfig
from envd.errors import ConfigError
from envd.guest.actions import Action, Done, Wait
from envd.hypervisor.images.build import build_image
from envd.hypervisor.images.catalogue import ImageCatalogue
from envd.hypervisor.images.recipe import desktop_recipe
from envd.tasks.model import Task
from envd.tasks.replay import replay
from envd.telemetry import logs

DEFAULT_TASK, DEFAULT_FAKE_TASK = "desktop/save-shopping-list", "fake/save-note"
_POOL_SIZE = 2
#: Two machines may boot under TCG on a small host first.
_RESET_TIMEOUT = timedelta(minutes=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one episode does, and the reward that it must get."""

    name: str
    steps: tuple[tuple[Action, ...], ...]
    expected_reward: float


def policies_for(task: Task) -> tuple[Policy, Policy]:
    """Return the policy that solves `task` and the one that does nothing."""
    nothing: tuple[tuple[Action, ...], ...] = ((Wait(duration_s=1.0),), (Done(),))
    return (
        Policy(name="oracle", steps=task.oracle, expected_reward=1.0),
        Policy(name="null", steps=nothing, expected_reward=0.0),
    )


@friendly
def demo(
    *,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the evidence goes.")] = Path("out/demo"),
    task_id: Annotated[
        str, typer.Option("--task", metavar="TASK", help="The task to attempt.", show_default=DEFAULT_TASK)
    ] = "",
    state_dir: StateDir = None,
    cache_dir: CacheDir = None,
    config: ConfigFile = None,
    hypervisor: Hypervisor = None,
    accelerator: Accelerator = None,
    as_json: Json = False,
) -> None:
    """Run a solved and an idle episode on real machines; fail unless their rewards are 1.0 and 0.0."""
    settings = load_config(
        config, state_dir=state_dir, cache_dir=cache_dir, hypervisor=hypervisor, accelerator=accelerator
    )
    logs.setup(log_format=settings.log_format, level="warning" if settings.log_level == "info" else settings.log_level)
    is_fake = settings.hypervisor_uri == "fake"
    task = load_tasks(settings).get(task_id or (DEFAULT_FAKE_TASK if is_fake else DEFAULT_TASK))
    if not task.oracle:
        raise ConfigError(f"task {task.task_id} has no oracle, so there is nothing to show; choose another")
    began_s = time.monotonic()
    if not is_fake:
        _ensure_image(settings)
    image_s = time.monotonic() - began_s
    playing = _run(demo_config(settings), task, DemoDirectory(out_dir), image_s=image_s)
    try:
        report = uvloop.run(_until_sigterm(playing))
    except asyncio.CancelledError as cancelled:
        raise typer.Exit(128 + signal.SIGTERM) from cancelled
    if as_json:
        emit_json(report.as_json())
    else:
        _print(report, out_dir)
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


def demo_config(settings: Config) -> Config:
    """Return settings for a daemon of a demo's own: two machines, free ports, and state apart from a served one."""
    pool = settings.pools.get(DEFAULT_IMAGE, PoolConfig(image=DEFAULT_IMAGE))
    pool = pool.model_copy(update={"size": _POOL_SIZE, "capacity": _POOL_SIZE, "max_starting": _POOL_SIZE})
    return settings.model_copy(
        update={
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "state_dir": settings.state_dir / "demo",
            "hypervisor": settings.hypervisor.model_copy(update={"uri": _own_uri(settings)}),
            "pools": {DEFAULT_IMAGE: pool},
        }
    )


def _own_uri(settings: Config) -> str:
    # An embedded driver's root has one user at a time; left out, it follows the state directory.
    return "" if settings.hypervisor.uri.startswith("qemu:///embed") else settings.hypervisor.uri


def _ensure_image(settings: Config) -> None:
    stop_on_sigterm()
    with progress(f"image {DEFAULT_IMAGE}") as report:
        build_image(desktop_recipe(), ImageCatalogue(settings.cache_dir), progress=report)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _until_sigterm(work: Coroutine[Any, Any, DemoReport]) -> DemoReport:
    """Have SIGTERM cancel `work`, as Ctrl-C does, so that its machines go."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _run(config: Config, task: Task, directory: DemoDirectory, *, image_s: float) -> DemoReport:
    began_s = time.monotonic()
    async with open_daemon(config) as daemon:
        _say(f"hypervisor: {daemon.hypervisor.description}")
        telling = asyncio.create_task(_tell_pools(daemon), name="demo:pools")
        try:
            async with EpisodeDriver(daemon.address) as driver:
                with failures_explained():
                    episodes = await _play_both(driver, task, directory)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        played_s = time.monotonic() - began_s
    report = DemoReport(
        task_id=task.task_id,
        instruction=task.instruction.strip(),
        image=DEFAULT_IMAGE,
        accelerator=daemon.hypervisor.accelerator.value,
        hypervisor=daemon.hypervisor.description,
        timings_s={"image": image_s, "daemon": played_s, "shutdown": time.monotonic() - began_s - played_s},
        episodes=episodes,
    )
    directory.write_animation(episodes[0].policy, [step.frame for step in episodes[0].steps])
    directory.write_report(report)
    return report


async def _play_both(driver: EpisodeDriver, task: Task, directory: DemoDirectory) -> tuple[EpisodeRecord, ...]:
    policies = policies_for(task)
    _say(f"resetting a group of {len(policies)} episodes of {task.task_id}")
    # One group: while both hold a machine none boots, so neither episode is slowed down by one.
    opened = await driver.reset(task.task_id, pool=DEFAULT_IMAGE, group_size=len(policies), timeout=_RESET_TIMEOUT)
    try:
        return tuple(
            [
                await _play(driver, policy, opened, member=member, directory=directory)
                for member, policy in enumerate(policies)
            ]
        )
    finally:
        for episode in opened.episodes:
            await driver.close(episode.episode_id)


async def _play(
    driver: EpisodeDriver, policy: Policy, opened: ResetResponse, *, member: int, directory: DemoDirectory
) -> EpisodeRecord:
    episode_id = opened.episodes[member].episode_id
    first = opened.observations[member]
    steps = [
        StepRecord(
            actions=(),
            errors=(),
            frame=directory.write_frame(f"{policy.name}-00", first.frame.keyframe.data),
            frame_id=first.frame.frame_id,
            settled=first.settle.settled,
            timings_ms=dict(opened.timings_ms),
        )
    ]

    async def step(actions: tuple[Action, ...]) -> str:
        index = len(steps)
        answer = await driver.step(episode_id, *actions, step_index=index - 1)
        seen = answer.observation
        steps.append(
            StepRecord(
                actions=tuple(map(repr, actions)),
                errors=tuple(result.error for result in answer.action_results if result.error),
                frame=directory.write_frame(f"{policy.name}-{index:02}", seen.frame.keyframe.data),
                frame_id=seen.frame.frame_id,
                settled=seen.settle.settled,
                timings_ms=dict(answer.timings_ms),
            )
        )
        _say(f"{policy.name}: step {index}, {answer.timings_ms['total']:.0f} ms")
        return seen.frame.frame_id

    await replay(policy.steps, first_frame_id=first.frame.frame_id, step=step)
    verdict = await driver.evaluate(episode_id)
    _say(f"{policy.name}: reward {verdict.score:g}")
    return EpisodeRecord(
        policy=policy.name,
        expected_reward=policy.expected_reward,
        episode_id=episode_id,
        state=verdict.episode.State.Name(verdict.episode.state).removeprefix("STATE_").lower(),
        end_reason=verdict.episode.end_reason,
        reward=verdict.score,
        checks=tuple(CheckRecord(name=c.name, score=c.score, evidence=c.evidence) for c in verdict.checks),
        evaluate_timings_ms=dict(verdict.timings_ms),
        steps=tuple(steps),
    )


async def _tell_pools(daemon: Daemon) -> None:
    told = ""
    async for infos in daemon.service.watch_pools():
        for info in infos:
            line = progress_line(info, size=_POOL_SIZE)
            if line != told:
                told = line
                _say(line)
            if is_ready(info, size=_POOL_SIZE):
                return


def _say(line: str) -> None:
    err.print(line, markup=False, soft_wrap=True)


def _print(report: DemoReport, directory: Path) -> None:
    table = Table(
        "policy", "reward", "expected", "steps", "mean step", "mean settle", "evaluate", box=None, pad_edge=False
    )
    for episode in report.episodes:
        steps = episode.steps[1:]
        table.add_row(
            episode.policy,
            f"[{'green' if episode.as_expected else 'bold red'}]{episode.reward:g}[/]",
            f"{episode.expected_reward:g}",
            str(len(steps)),
            _mean_ms(steps, "total"),
            _mean_ms(steps, "settle"),
            f"{episode.evaluate_timings_ms.get('total', 0):.0f} ms",
        )
    reset_ms = report.episodes[0].steps[0].timings_ms
    in_order = sorted(reset_ms.items(), key=lambda phase: phase[0] == "total")
    phases = ", ".join(f"{phase} {duration_ms / 1000:.1f} s" for phase, duration_ms in in_order)
    out.print(f"{report.task_id} on {report.image}, {report.accelerator}", markup=False)
    out.print(table)
    out.print(f"reset of both: {phases}", markup=False, soft_wrap=True)
    out.print(f"frames, oracle.gif and episode.json are in {directory}", markup=False, soft_wrap=True)


def _mean_ms(steps: Sequence[StepRecord], phase: str) -> str:
    return f"{sum(step.timings_ms.get(phase, 0) for step in steps) / len(steps):.0f} ms" if steps else "-"
