"""The command `envd tasks record`: a demonstration becomes a task."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cuaenv.actions import Action
from cuaenv.cli.terminal import err, out
from cuaenv.client import AsyncEnvClient, AsyncEpisode
from cuaenv.problems import without_path
from envd.authoring.demonstration import Proposal, propose, task_text
from envd.authoring.playing import play
from envd.authoring.targets import TargetRecorder
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.bench.session import maps_call_errors
from envd.cli.command import command
from envd.cli.own_daemon import ensure_image, own_daemon_options, run_until_signal
from envd.cli.terminal import printable
from envd.daemon.composition import Daemon, open_daemon
from envd.daemon.ephemeral import ephemeral_config
from envd.daemon.suites import inspect_tasks, load_tasks
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeObserver, PerformedStep
from envd.hypervisor.backends import backend_of
from envd.tasks.formats.entries import Problem
from envd.tasks.model import Task
from envd.tasks.oracle import OracleAction, OracleSteps, parse_action

_POLL_S = 0.3
_RESET_TIMEOUT = timedelta(minutes=20)


@dataclass(eq=False)
class _Demonstration(EpisodeObserver):
    """The steps of one episode."""

    steps: list[tuple[Action, ...]] = field(default_factory=list)
    stepped_now: asyncio.Event = field(default_factory=asyncio.Event)

    def stepped(self, episode: Episode, step: PerformedStep) -> None:  # noqa: ARG002 -- the protocol's signature
        """Keep a step's actions."""
        if step.performed:
            self.steps.append(step.performed)
            self.stepped_now.set()


@command(own_daemon_options("console_listen"))
def record(
    settings: Config,
    *,
    name: Annotated[str, typer.Argument(metavar="SUITE/NAME", help="Id of the new task.")],
    instruction: Annotated[str, typer.Option(metavar="TEXT", help="What the agent is asked to do.", prompt=True)],
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where SUITE-NAME.yaml is written.")] = Path(),
    setup_file: Annotated[
        Path | None, typer.Option("--setup", metavar="FILE", help="YAML list of setup verbs: the start of the task.")
    ] = None,
    script_file: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="YAML list of steps to play instead of a person.")
    ] = None,
    image: Annotated[str, typer.Option(help="Image to demonstrate on.", show_default="the desktop image")] = "",
    accept: Annotated[bool, typer.Option("--accept", help="Take all likely proposals without asking.")] = False,
) -> None:
    """Show a task once, in the console or by a script, and write it with setup, oracle and checkers."""
    suite, _, short = name.partition("/")
    if not suite or not short:
        raise ConfigError(f"{name}: write SUITE/NAME, such as office/rename-draft")
    setup, script = _yaml_list(setup_file, "--setup"), _steps(_yaml_list(script_file, "--script"), script_file)
    path = out_dir / f"{suite}-{short}.yaml"
    if path.exists():
        raise ConfigError(f"{path}: it exists; choose another name or --out")
    if not image:
        ensure_image(settings)
    pool = {"size": 2, "capacity": 2, "allow_guest_access": True}
    config = ephemeral_config(settings, name="record", pool=pool, image=image)
    config = config.model_copy(update={"console_listen": settings.console_listen or "127.0.0.1:0"})
    out_dir.mkdir(parents=True, exist_ok=True)
    with _start_file(out_dir, suite, short, instruction, setup) as start:
        suites = (*config.tasks.suites, str(start.resolve()))
        config = config.model_copy(update={"tasks": config.tasks.model_copy(update={"suites": suites})})
        for problem in inspect_tasks(config):
            if isinstance(problem, Problem) and problem.task_id == name:
                # Not its file, which is removed.
                place = f"--setup {setup_file}" if problem.field.startswith("setup") else name
                raise ConfigError(": ".join(filter(None, (place, problem.field, problem.message))))
        task = load_tasks(config).get(name)
        steps, proposals = run_until_signal(_record(config, task, script))
    chosen = _chosen(proposals, accept=accept)
    if not chosen:
        raise ConfigError("no checker was chosen: a task needs one")
    path.write_text(
        task_text(
            suite=suite,
            name=short,
            instruction=instruction,
            setup=setup,
            steps=steps,
            proposals=proposals,
            chosen=chosen,
        ),
        encoding="utf-8",
    )
    uri = f" --hypervisor {settings.hypervisor.uri}" if settings.hypervisor.uri else ""
    out.print(f"wrote {path}; next: envd tasks verify {name} --tasks {path}{uri}", markup=False, soft_wrap=True)


@contextmanager
def _start_file(directory: Path, suite: str, name: str, instruction: str, setup: list[Any]) -> Iterator[Path]:
    """Write a task file with the start of the task, next to the later one so that local paths mean the same."""
    task = {"name": name, "level": 1, "instruction": instruction, "setup": setup, "infeasible": True}
    path = directory / f".{suite}-{name}.yaml"
    path.write_text(yaml.safe_dump({"suite": suite, "tasks": [task]}, allow_unicode=True), encoding="utf-8")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


async def _record(
    config: Config, task: Task, script: OracleSteps
) -> tuple[list[tuple[OracleAction, ...]], list[Proposal]]:
    guests = backend_of(config.hypervisor.uri).capabilities.runs_guests
    async with open_daemon(config) as daemon:
        demonstration = _Demonstration()
        async with AsyncEnvClient(daemon.address, token="") as client:
            with maps_call_errors():
                async with client.reset_group(task.task_id, size=2, timeout=_RESET_TIMEOUT) as (shown, witness):
                    daemon.service.events.add(demonstration)
                    targets = TargetRecorder(shown, os=task.os)
                    _episode(daemon, shown).machine.desktop.before_act = targets.before_act
                    if script:
                        await play(
                            shown, script, os=task.os, runs_guests=guests, on_step=lambda _actions, _result: None
                        )
                    else:
                        await _watch(daemon, shown, demonstration)
                    steps = [tuple(map(targets.aimed, step)) for step in script or demonstration.steps]
                    return steps, await propose(witness, shown)


def _episode(daemon: Daemon, shown: AsyncEpisode) -> Episode:
    episode = daemon.service.find(shown.episode_id)
    if episode is None:
        raise AssertionError("the group is open")
    return episode


async def _watch(daemon: Daemon, shown: AsyncEpisode, demonstration: _Demonstration) -> None:
    """Return once a person has taken control, acted, and handed back."""
    url = f"http://{daemon.console_address}/#episode={shown.episode_id}"
    err.print(f"open {url}\nTake control, show the task, and hand back.", markup=False, soft_wrap=True)
    episode = _episode(daemon, shown)
    while episode.human.control_id or not episode.progress.people_actions:
        demonstration.stepped_now.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await demonstration.stepped_now.wait()


def _chosen(proposals: Sequence[Proposal], *, accept: bool) -> list[int]:
    """Return the proposals that are the goal, by index; asks on a terminal."""
    likely = [index for index, proposal in enumerate(proposals) if proposal.is_likely]
    for index, proposal in enumerate(proposals):
        err.print(
            f"{index + 1:3} {'*' if proposal.is_likely else ' '} {printable(proposal.what)}",
            markup=False,
            soft_wrap=True,
        )
    if accept or not proposals or not sys.stdin.isatty():
        return likely
    shown = ",".join(str(index + 1) for index in likely)
    while (chosen := _numbers(typer.prompt("Which of them are the goal? Numbers", default=shown), proposals)) is None:
        pass  # the demonstration is not to be lost by a typing error
    return chosen


def _numbers(answer: str, proposals: Sequence[Proposal]) -> list[int] | None:
    """Return the proposals that an answer names, by index; None, with a message, if it names none or others."""
    words = answer.replace(",", " ").split()
    chosen = sorted({int(word) - 1 for word in words if word.isdecimal()})
    if words and all(word.isdecimal() for word in words) and 0 <= chosen[0] <= chosen[-1] < len(proposals):
        return chosen
    err.print(f"{answer}: write numbers from 1 to {len(proposals)}, separated by commas", markup=False)
    return None


def _yaml_list(path: Path | None, option: str) -> list[Any]:
    if path is None:
        return []
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot be read: {without_path(error)}") from error
    if not isinstance(value, list):
        raise ConfigError(f"{option} {path}: not a YAML list")
    return value


def _steps(values: list[Any], path: Path | None) -> OracleSteps:
    steps = []
    for index, step in enumerate(values):
        if not isinstance(step, list):
            raise ConfigError(f"--script {path}: step {index}: is not a list of actions")
        try:
            steps.append(tuple(map(parse_action, step)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--script {path}: step {index}: {error}") from error
    return tuple(steps)
