"""`envd demo`: show on real machines what forks are good for, and that rewards are earned.

A group of four begins in one state of one task. One member solves it, one does nothing, and two are branched where
they stand in the middle: one branch goes on where its parent stops, the other goes astray while its parent goes on.
All of it goes over real gRPC to a pool in this process; the evidence is left in a directory.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from envd.api.driver import EpisodeDriver, ForkResponse, ResetResponse, Seen, failures_explained
from envd.cli.daemon import Daemon, open_daemon
from envd.cli.demo_report import CheckRecord, DemoDirectory, DemoReport, EpisodeRecord, StepRecord
from envd.cli.options import Accelerator, CacheDir, ConfigFile, Hypervisor, Json, StateDir, load_config
from envd.cli.output import EXIT_FAILED, emit_json, err, friendly, out
from envd.cli.private import ensure_image, private_config, run_to_end
from envd.cli.serve import is_ready, progress_line
from envd.cli.suites import load_tasks
from envd.config import DEFAULT_IMAGE, Config
from envd.errors import ConfigError
from envd.guest.actions import Action, Done, TypeText, Wait
from envd.hypervisor.machine import Accelerator as AcceleratorKind
from envd.tasks.model import Task
from envd.tasks.replay import replay
from envd.telemetry import logs

DEFAULT_TASK, DEFAULT_FAKE_TASK = "desktop/save-shopping-list", "fake/save-note"
#: Machines kept ready: one is set up, the others of its group are forked from it.
_POOL_SIZE = 1
#: Four members, two branches, and a spare that takes the place of the one that was handed out.
_CAPACITY = 7
#: The template may boot under TCG on a small host first.
_RESET_TIMEOUT = timedelta(minutes=20)

Steps = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one episode does, and the reward that it must get."""

    name: str
    steps: Steps
    expected_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of the group: what it does, and the branch that leaves it on the way, if one does."""

    policy: Policy
    branch: Policy | None = None
    branch_at: int = 0
    """Steps before the branch."""


def members_for(task: Task) -> tuple[Member, ...]:
    """Return the group of `task`: the oracle, one that does nothing, and two that are branched half way."""
    stop: Steps = ((Done(),),)
    astray: Steps = ((TypeText(text="astray "), Wait(duration_s=1.0)), (Done(),))
    half = len(task.oracle) // 2
    start, rest = task.oracle[:half], task.oracle[half:]
    return (
        Member(policy=Policy(name="oracle", steps=task.oracle, expected_reward=1.0)),
        Member(policy=Policy(name="null", steps=((Wait(duration_s=1.0),), *stop), expected_reward=0.0)),
        Member(
            policy=Policy(name="stops", steps=(*start, *stop), expected_reward=0.0),
            branch=Policy(name="stops-branch-solves", steps=rest, expected_reward=1.0),
            branch_at=half,
        ),
        Member(
            policy=Policy(name="solves", steps=task.oracle, expected_reward=1.0),
            branch=Policy(name="solves-branch-strays", steps=astray, expected_reward=0.0),
            branch_at=half,
        ),
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
    """Fork a group of four desktops from one task state, branch two of them, and check every reward."""
    settings = load_config(
        config, state_dir=state_dir, cache_dir=cache_dir, hypervisor=hypervisor, accelerator=accelerator
    )
    logs.setup(log_format=settings.log_format, level="warning" if settings.log_level == "info" else settings.log_level)
    is_fake = settings.hypervisor_uri == "fake"
    task = load_tasks(settings).get(task_id or (DEFAULT_FAKE_TASK if is_fake else DEFAULT_TASK))
    if not task.oracle:
        raise ConfigError(f"task {task.task_id} has no oracle, so there is nothing to show; choose another")
    began_s = time.monotonic()
    ensure_image(settings)
    image_s = time.monotonic() - began_s
    report = run_to_end(_run(demo_config(settings), task, DemoDirectory(out_dir), image_s=image_s))
    if as_json:
        emit_json(report.as_json())
    else:
        _print(report, out_dir)
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


def demo_config(settings: Config) -> Config:
    """Return settings for a demo's own daemon: few machines, and state apart from a served one."""
    return private_config(settings, name="demo", pool={"size": _POOL_SIZE, "capacity": _CAPACITY})


async def _run(config: Config, task: Task, directory: DemoDirectory, *, image_s: float) -> DemoReport:
    began_s = time.monotonic()
    async with open_daemon(config) as daemon:
        _say(f"hypervisor: {daemon.hypervisor.description}")
        telling = asyncio.create_task(_tell_pools(daemon), name="demo:pools")
        try:
            async with EpisodeDriver(daemon.address) as driver:
                with failures_explained():
                    is_real = daemon.hypervisor.accelerator is not AcceleratorKind.FAKE
                    group = await _play_group(driver, task, directory, is_real=is_real)
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
        reset_timings_ms=group.reset_timings_ms,
        episodes=group.episodes,
    )
    directory.write_animation("oracle", [step.frame for step in report.episodes[0].steps])
    directory.write_picture("group", report.episodes)
    directory.write_report(report)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlayedGroup:
    reset_timings_ms: dict[str, float]
    episodes: tuple[EpisodeRecord, ...]


async def _play_group(driver: EpisodeDriver, task: Task, directory: DemoDirectory, *, is_real: bool) -> _PlayedGroup:
    members = members_for(task)
    _say(f"resetting a group of {len(members)} episodes of {task.task_id}")
    opened = await driver.reset(task.task_id, pool=DEFAULT_IMAGE, group_size=len(members), timeout=_RESET_TIMEOUT)
    players = [
        _Player(driver, directory, policy=member.policy, opened=opened, member=index, is_real=is_real)
        for index, member in enumerate(members)
    ]
    branches: list[_Player] = []
    try:
        for member, player in zip(members, players, strict=True):
            if member.branch is not None:
                await player.play(member.policy.steps[: member.branch_at])
                branch = await player.fork(member.branch)
                branches.append(branch)
                # The parent first: what it does must not show in its branch.
                await player.play(member.policy.steps[member.branch_at :])
                await branch.play(member.branch.steps)
            else:
                await player.play(member.policy.steps)
        records = [await player.score() for player in (*players, *branches)]
        return _PlayedGroup(reset_timings_ms=dict(opened.timings_ms), episodes=tuple(records))
    finally:
        for player in (*players, *branches):
            await driver.close(player.episode_id)


class _Player:
    """Plays one episode and keeps what was seen."""

    def __init__(
        self,
        driver: EpisodeDriver,
        directory: DemoDirectory,
        *,
        policy: Policy,
        opened: ResetResponse | ForkResponse,
        is_real: bool,
        member: int = 0,
    ) -> None:
        self._driver = driver
        self._directory = directory
        self._policy = policy
        self._is_real = is_real
        self._info = opened.episodes[member]
        self._steps: list[StepRecord] = []
        self._step_index = self._info.step_count
        self._note((), opened.observations[member], errors=(), timings_ms=dict(opened.timings_ms))

    @property
    def episode_id(self) -> str:
        """The episode that it plays."""
        return self._info.episode_id

    async def play(self, steps: Steps) -> None:
        """Play some steps."""
        frame_id = self._steps[-1].frame_id
        if self._is_real:
            await replay(steps, first_frame_id=frame_id, step=self._step)
        else:  # a drawn desktop has drawn before its input returns
            await replay(steps, first_frame_id=frame_id, step=self._step, patience_s=())

    async def fork(self, policy: Policy) -> "_Player":
        """Branch the episode where it stands; return who plays the branch."""
        opened = await self._driver.fork(self.episode_id, step_index=self._step_index)
        _say(
            f"{self._policy.name}: branched after step {self._step_index} in {opened.timings_ms['total']:.0f} ms,"
            f" stood still for {opened.timings_ms['pause']:.0f} ms"
        )
        return _Player(self._driver, self._directory, policy=policy, opened=opened, is_real=self._is_real)

    async def score(self) -> EpisodeRecord:
        """Have the episode evaluated."""
        verdict = await self._driver.evaluate(self.episode_id)
        _say(f"{self._policy.name}: reward {verdict.score:g}")
        return EpisodeRecord(
            policy=self._policy.name,
            expected_reward=self._policy.expected_reward,
            episode_id=self.episode_id,
            parent_episode_id=self._info.parent_episode_id,
            template_digest=self._info.origin.template_digest,
            state=verdict.episode.State.Name(verdict.episode.state).removeprefix("STATE_").lower(),
            end_reason=verdict.episode.end_reason,
            reward=verdict.score,
            checks=tuple(CheckRecord(name=c.name, score=c.score, evidence=c.evidence) for c in verdict.checks),
            evaluate_timings_ms=dict(verdict.timings_ms),
            steps=tuple(self._steps),
        )

    async def _step(self, actions: tuple[Action, ...]) -> str:
        answer = await self._driver.step(self.episode_id, *actions, step_index=self._step_index)
        self._step_index += 1
        errors = tuple(result.error for result in answer.action_results if result.error)
        self._note(actions, answer.observation, errors=errors, timings_ms=dict(answer.timings_ms))
        _say(f"{self._policy.name}: step {self._step_index}, {answer.timings_ms['total']:.0f} ms")
        return answer.observation.frame.frame_id

    def _note(
        self, actions: tuple[Action, ...], seen: Seen, *, errors: tuple[str, ...], timings_ms: dict[str, float]
    ) -> None:
        name = f"{self._policy.name}-{self._step_index:02}"
        self._steps.append(
            StepRecord(
                actions=tuple(map(repr, actions)),
                errors=errors,
                frame=self._directory.write_frame(name, seen.frame.keyframe.data),
                frame_id=seen.frame.frame_id,
                settled=seen.settle.settled,
                timings_ms=timings_ms,
            )
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
    in_order = sorted(report.reset_timings_ms.items(), key=lambda phase: phase[0] == "total")
    phases = ", ".join(f"{phase} {duration_ms / 1000:.2f} s" for phase, duration_ms in in_order)
    out.print(f"{report.task_id} on {report.image}, {report.accelerator}", markup=False)
    out.print(table)
    out.print(f"reset of the group: {phases}", markup=False, soft_wrap=True)
    if not report.began_alike:
        out.print("[bold red]the members of the group did not begin with one frame[/]")
    out.print(f"group.png, frames, oracle.gif and episode.json are in {directory}", markup=False, soft_wrap=True)


def _mean_ms(steps: Sequence[StepRecord], phase: str) -> str:
    return f"{sum(step.timings_ms.get(phase, 0) for step in steps) / len(steps):.0f} ms" if steps else "-"
