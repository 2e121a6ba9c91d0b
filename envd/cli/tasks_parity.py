"""The command `envd tasks parity`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, err
from envd.authoring.desktops import own_desktops, running_desktops
from envd.authoring.parity.playing import PlannedScript, PlayedScript, SideName, parity_config, play_side
from envd.authoring.parity.report import ParityReport, pair_up
from envd.authoring.parity.scripts import ParityScript, read_trajectories, scripts_of
from envd.authoring.results import PlayResults
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.bench.episodes import require_osworld
from envd.bench.parity_peer import play_side_in_desktop_env
from envd.cli.command import command
from envd.cli.own_daemon import own_daemon_options, run_until_signal, with_hypervisor
from envd.cli.remote import RemoteDaemon, TlsCa, TlsCert, TlsKey
from envd.cli.tasks_verify import Suites, TaskIds, choose, names_of, on_image
from envd.cli.terminal import print_result
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.backends import backend_of
from envd.tasks.basis import judged_digest, task_digest
from envd.tasks.model import Task

#: A side: OSWorld's own environment instead of ours.
DESKTOP_ENV = "desktop-env"
_ADDRESS = re.compile(r"[\w.\-\[\]:]*:\d+(,[\w.\-\[\]:]*:\d+)*")


@command(own_daemon_options("tasks"))
def parity_command(
    settings: Config,
    *,
    task_ids: TaskIds = None,
    suites: Suites = None,
    left: Annotated[
        str,
        typer.Option(
            "--left",
            metavar="SIDE",
            help="qemu, oci: or fake; HOST:PORT of a daemon; or desktop-env, which is OSWorld's.",
        ),
    ],
    right: Annotated[
        str, typer.Option("--right", metavar="SIDE", help="The other side. Without it only the left is played.")
    ] = "",
    walk_count: Annotated[int, typer.Option("--walks", min=0, max=100, help="Random walks in each task.")] = 2,
    seed: Annotated[int, typer.Option("--seed", help="Of the random walks.")] = 0,
    trajectories: Annotated[
        Path | None,
        typer.Option("--trajectories", metavar="DIR", help="Also recorded actions: OSWorld's files TASK/traj.jsonl."),
    ] = None,
    image: Annotated[str, typer.Option(help="Image to play on.", show_default="the tasks' own")] = "",
    parallel_count: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Tasks played at once.")] = 1,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of the results.")] = Path(
        "out/parity"
    ),
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Play the same scripts on two kinds of desktops, and compare scores and screens task by task.

    The scripts are each task's oracle, nothing, and random walks. The left side is played first. The same command
    continues after an interruption: a script that has a score is not played again unless its task, checker or side
    changed. A script without a score is void and never counts as one.
    """
    recorded = read_trajectories(trajectories) if trajectories else {}
    wanted = names_of(task_ids, suites)
    targets: dict[SideName, str] = {"left": left, "right": right}
    sides = [_side_of(settings, name, target, wanted) for name, target in targets.items() if target]
    settings = next((side.config for side in sides if side.config), with_suites(settings, wanted))
    is_osworld = bool(recorded) or DESKTOP_ENV in {left, right}
    catalogue = load_tasks(settings, include_osworld=is_osworld)
    if recorded and not wanted:
        chosen = [each for each in catalogue.list() if _trajectories_of(each, recorded)]
    else:
        chosen = choose(catalogue, wanted)
    scripts = {
        each.task_id: scripts_of(each, walk_count=walk_count, seed=seed, trajectories=_trajectories_of(each, recorded))
        for each in chosen
    }
    if DESKTOP_ENV in {left, right}:
        # It performs pyautogui calls only.
        scripts = {task_id: [each for each in found if not each.steps] for task_id, found in scripts.items()}
    screens = out_dir / "screens"
    results: dict[SideName, list[PlayedScript]] = {"left": [], "right": []}
    with PlayResults(out_dir / "results.jsonl", PlayedScript) as file:
        for side in sides:
            side_image, playable = image, chosen
            if side.config is not None:
                side_image, playable, _ = on_image(side.config, chosen, image)
            planned = [
                PlannedScript(task=task, script=script, digest=side.digest(task, script, image=side_image))
                for task in playable
                for script in scripts[task.task_id]
            ]
            unscored = [each for each in planned if not _has_score(file, each.digest)]
            if len(unscored) < len(planned):
                err.print(f"{side.name}: {len(planned) - len(unscored)} scripts have a score and are not played again")
            if unscored:
                most = max(map(len, scripts.values()))
                # DesktopEnv boots machines of its own, so the pool only makes the template.
                task_count = parallel_count if side.osworld is None else 1
                own = side.config and parity_config(
                    side.config, parallel_count=task_count, script_count=most, image=side_image
                )
                remote = RemoteDaemon(envd=side.target, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
                if side.osworld is not None and own is not None:
                    python, tasks = side.osworld
                    playing = play_side_in_desktop_env(
                        own,
                        unscored,
                        python=python,
                        tasks=tasks,
                        side=side.name,
                        screens=screens,
                        parallel_count=parallel_count,
                        on_result=file.add,
                    )
                else:
                    playing = play_side(
                        own_desktops(own) if own is not None else running_desktops(remote.client),
                        unscored,
                        side=side.name,
                        screens=screens,
                        parallel_count=parallel_count,
                        on_result=file.add,
                    )
                run_until_signal(playing)
            results[side.name] = [file.results[each.digest] for each in planned if each.digest in file.results]
    report = ParityReport(
        left=left, right=right, pairs=pair_up(results["left"], results["right"], screens), screens=screens
    )
    (out_dir / "parity.html").write_text(report.page(), encoding="utf-8")
    print_result(report, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side, as its option names it."""

    name: SideName
    target: str
    config: Config | None
    """Settings of the daemon that the command starts; None for a running one."""
    osworld: tuple[Path, Path] | None = None
    """OSWorld's Python and directory of tasks if its DesktopEnv plays this side."""

    def digest(self, task: Task, script: ParityScript, *, image: str) -> str:
        """Return the digest (16 hex digits) of what is played. A running daemon has the checkers of its own release."""
        own = script.digest(task_digest(task) if self.config is None else judged_digest(task))
        content = [self.name, self.target, image if self.config else "", own]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _side_of(settings: Config, name: SideName, target: str, wanted: Sequence[str]) -> _Side:
    """Return the side that an option names. Raises: ConfigError: It cannot be used on this host."""
    if _ADDRESS.fullmatch(target):
        return _Side(name=name, target=target, config=None)
    if target != DESKTOP_ENV:
        config = with_hypervisor(settings, target, option=f"--{name}")
        return _Side(name=name, target=target, config=with_suites(config, wanted))
    if not backend_of(settings.hypervisor.uri).capabilities.runs_guests:
        raise ConfigError(
            f"--{name} {DESKTOP_ENV}: it needs real guests; use QEMU, the default, or oci: as --hypervisor"
        )
    if others := [each for each in wanted if not each.startswith("osworld")]:
        raise ConfigError(f"--{name} {DESKTOP_ENV}: task {others[0]} is not OSWorld's; name tasks osworld/ID")
    osworld = require_osworld(settings.cache_dir)
    return _Side(name=name, target=target, config=with_suites(settings, wanted), osworld=osworld)


def _trajectories_of(task: Task, recorded: Mapping[str, Sequence[ParityScript]]) -> Sequence[ParityScript]:
    return recorded.get(task.task_id.partition("/")[2], ())


def _has_score(file: PlayResults[PlayedScript], digest: str) -> bool:
    return digest in file.results and file.results[digest].score is not None
