"""The command `envd tasks parity`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, err
from envd.authoring.parity.playing import (
    PlannedScript,
    PlayedScript,
    ScreenDirectory,
    SideName,
    own_desktops,
    parity_config,
    play_side,
    running_desktops,
)
from envd.authoring.parity.report import ParityReport, pair_up
from envd.authoring.parity.scripts import Script, read_trajectories, scripts_of
from envd.authoring.results import ResultsFile
from envd.base.config import Config
from envd.cli.command import command
from envd.cli.own_daemon import own_daemon_options, run_until_signal, with_hypervisor
from envd.cli.remote import RemoteDaemon, TlsCa, TlsCert, TlsKey
from envd.cli.tasks_verify import Suites, TaskIds, choose, names_of, on_image
from envd.cli.terminal import print_result
from envd.daemon.suites import load_tasks, with_suites
from envd.tasks.basis import judged_digest, task_digest
from envd.tasks.model import Task

_ADDRESS = re.compile(r"[\w.\-\[\]:]*:\d+(,[\w.\-\[\]:]*:\d+)*")


@command(own_daemon_options("tasks"))
def parity_command(
    settings: Config,
    *,
    task_ids: TaskIds = None,
    suites: Suites = None,
    left: Annotated[
        str, typer.Option("--left", metavar="URI|HOST:PORT", help="A hypervisor: qemu, oci: or fake; or a daemon.")
    ],
    right: Annotated[
        str,
        typer.Option("--right", metavar="URI|HOST:PORT", help="The other side. Without it only the left is played."),
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
    sides: dict[SideName, str] = {"left": left, **({"right": right} if right else {})}
    own = {
        name: with_hypervisor(settings, uri, option=f"--{name}")
        for name, uri in sides.items()
        if not _ADDRESS.fullmatch(uri)
    }
    recorded = read_trajectories(trajectories) if trajectories else {}
    wanted = names_of(task_ids, suites)
    catalogue = load_tasks(with_suites(next(iter(own.values()), settings), wanted), include_osworld=bool(recorded))
    chosen = choose(catalogue, wanted)
    if not wanted:
        chosen += [each for each in catalogue.list() if not each.oracle and _trajectories_of(each, recorded)]
    scripts = {
        each.task_id: scripts_of(each, walk_count=walk_count, seed=seed, trajectories=_trajectories_of(each, recorded))
        for each in chosen
    }
    screens = ScreenDirectory(out_dir / "screens")
    results: dict[SideName, list[PlayedScript]] = {"left": [], "right": []}
    with ResultsFile(out_dir / "results.jsonl", PlayedScript) as file:
        for name, uri in sides.items():
            config, playable, side_image = own.get(name), chosen, image
            if config is not None:
                config = with_suites(config, wanted)
                side_image, playable, _ = on_image(config, chosen, image)
            planned = [
                PlannedScript(
                    task=task,
                    script=script,
                    digest=_digest(name, uri, side_image, task, script, is_own=config is not None),
                )
                for task in playable
                for script in scripts[task.task_id]
            ]
            left_to_play = [each for each in planned if not _has_score(file, each.digest)]
            if len(left_to_play) < len(planned):
                err.print(f"{name}: {len(planned) - len(left_to_play)} scripts have a score and are not played again")
            if left_to_play:
                most = max(map(len, scripts.values()))
                if config is None:
                    remote = RemoteDaemon(envd=uri, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
                    opening = running_desktops(remote.client)
                else:
                    opening = own_desktops(
                        parity_config(config, parallel_count=parallel_count, script_count=most, image=side_image)
                    )
                playing = play_side(
                    opening, left_to_play, side=name, screens=screens, parallel_count=parallel_count, on_result=file.add
                )
                run_until_signal(playing)
            results[name] = [file.results[each.digest] for each in planned if each.digest in file.results]
    report = ParityReport(left=left, right=right, pairs=pair_up(*results.values(), screens), screens=screens)
    (out_dir / "parity.html").write_text(report.page(), encoding="utf-8")
    print_result(report, as_json=as_json)


def _trajectories_of(task: Task, recorded: Mapping[str, Sequence[Script]]) -> Sequence[Script]:
    return recorded.get(task.task_id.partition("/")[2], ())


def _digest(side: SideName, uri: str, image: str, task: Task, script: Script, *, is_own: bool) -> str:
    """Return the digest of what is played on one side. A running daemon has checkers of its own release."""
    own = script.digest(judged_digest(task) if is_own else task_digest(task))
    return hashlib.sha256(json.dumps([side, uri, image if is_own else "", own]).encode()).hexdigest()[:16]


def _has_score(file: ResultsFile[PlayedScript], digest: str) -> bool:
    return digest in file.results and file.results[digest].score is not None
