"""The command `envd tasks attack`."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, err
from envd.authoring.attack.mutants import Family, Mutant
from envd.authoring.attack.mutants import playable as mutants_to_play
from envd.authoring.attack.playing import Attack, attack, attack_config
from envd.authoring.attack.report import AttackReport, read_verdicts, write_passed
from envd.authoring.desktops import ScriptHosts, own_desktops, running_desktops
from envd.authoring.results import PlayResults
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.own_daemon import own_daemon_options, run_until_signal
from envd.cli.remote import RemoteDaemon, TlsCa, TlsCert, TlsKey
from envd.cli.tasks_oracles import read_mutants, read_oracles, with_oracle
from envd.cli.tasks_verify import Suites, TaskIds, choose, names_of, on_image
from envd.cli.terminal import print_result
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.backends import backend_of
from envd.tasks.basis import judged_digest
from envd.tasks.model import Task

_PROGRESS_EVERY_S = 60.0


def sampled(mutants: Sequence[Mutant], task_digest: str, count: int | None) -> list[Mutant]:
    """Return at most `count` mutants of each family, the same ones each time; all if it is None."""
    if count is None:
        return list(mutants)
    kept: Counter[Family] = Counter()
    chosen = []
    for mutant in sorted(mutants, key=lambda each: each.digest(task_digest)):
        kept[mutant.family] += 1
        if kept[mutant.family] <= count:
            chosen.append(mutant)
    return chosen


def _progress(total: int) -> Callable[[], None]:
    """Return a function to call after each mutant: it prints how many were played, and how long the rest takes.

    At most once a minute.
    """
    count = 0
    begun_s = printed_s = time.monotonic()

    def advance() -> None:
        nonlocal count, printed_s
        count += 1
        now_s = time.monotonic()
        if now_s - printed_s >= _PROGRESS_EVERY_S:
            printed_s = now_s
            left_min = (now_s - begun_s) / count * (total - count) / 60
            err.print(f"{count} of {total} mutants played, about {left_min:.0f} min left")

    return advance


def attackable(tasks: Sequence[Task], *, wanted: Collection[str], given: Collection[str]) -> list[Task]:
    """Return the tasks of which mutants can be made; reports how many others there are.

    Args:
        wanted: What the command names: tasks, and suites as `SUITE/`.
        given: Tasks whose oracle comes from a file; an empty one is attacked by cheats.

    Raises:
        ConfigError: A task that is named by its id has no checker or no oracle.
    """
    found = []
    for task in tasks:
        if task.checker and (task.oracle or task.task_id in given):
            found.append(task)
        elif task.task_id in wanted:
            problem = "no oracle; add one, or give it in --oracles" if task.checker else "no checker to attack"
            raise ConfigError(f"tasks attack: task {task.task_id} has {problem}")
    if count := len(tasks) - len(found):
        err.print(f"tasks without a checker or an oracle: {count}, skipped; one that is named is an error")
    return found


async def _runs_guests(opening: AbstractAsyncContextManager[ScriptHosts]) -> bool:
    async with opening as desktops:
        return desktops.runs_guests


@command(own_daemon_options("tasks"))
def attack_command(
    settings: Config,
    *,
    task_ids: TaskIds = None,
    suites: Suites = None,
    families: Annotated[
        list[Family] | None, typer.Option("--family", help="Play only this kind of mutant; repeatable. Default: all.")
    ] = None,
    oracles: Annotated[
        Path | None,
        typer.Option("--oracles", metavar="FILE", help="Oracles for other tasks, as `envd tasks oracles` prints them."),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample", min=0, help="At most so many mutants of a kind in each task, besides those in --oracles."
        ),
    ] = None,
    image: Annotated[str, typer.Option(help="Image to play on.", show_default="the tasks' own")] = "",
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--envd",
            metavar="HOST:PORT",
            help="Play on this running daemon of the same release; repeatable: several share the work.",
        ),
    ] = None,
    parallel_count: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Mutants played at once.")] = 2,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of the results.")] = Path(
        "out/attack"
    ),
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,  # noqa: ARG001 -- of releases that needed it
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with scripts and pictures.")
    ] = None,
    verdicts: Annotated[
        Path,
        typer.Option("--verdicts", metavar="FILE", help="Verdicts on mutants that survive, besides the built-in ones."),
    ] = Path("verdicts.yaml"),
    passed: Annotated[
        Path | None,
        typer.Option("--passed", metavar="FILE", help="Also write down which tasks passed, with their digests."),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
) -> None:
    """Play almost right solutions and cheats of each task, which a sound checker scores below 1, on forks.

    The same command continues after an interruption. A mutant is played again if its task, checker or image changed.
    """
    wanted = names_of(task_ids, suites)
    settings = with_suites(settings, wanted)
    given = read_oracles(oracles) if oracles else {}
    catalogue = load_tasks(settings, include_osworld=bool(given))
    named = map(catalogue.get, given) if given and not wanted else choose(catalogue, wanted)
    tasks = [with_oracle(each, given) for each in named]
    chosen = attackable(tasks, wanted=wanted, given=given)
    extra = read_mutants(oracles, chosen) if oracles else {}
    reviewed = read_verdicts(files("envd.authoring.attack") / "verdicts.yaml") | read_verdicts(verdicts)
    if targets and image:
        raise ConfigError("--image and --envd: the pools of running daemons have their images; leave one out")
    remote = RemoteDaemon(envd=",".join(targets or ()), tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
    if targets:
        playable, runs_guests = chosen, run_until_signal(_runs_guests(running_desktops(remote.client)))
        opening = running_desktops(remote.client, same_release=True)
    else:
        image, playable, _ = on_image(settings, chosen, image)
        runs_guests = backend_of(settings.hypervisor.uri).capabilities.runs_guests
        opening = own_desktops(attack_config(settings, parallel_count=parallel_count, image=image))
    for written in filter(None, (html, passed)):
        written.parent.mkdir(parents=True, exist_ok=True)
    path = out_dir / "results.jsonl"
    with PlayResults(path, Attack) as file:
        if file.results:
            note = (
                f"{path} has {len(file.results)} results; their mutants are not played again unless they had no score"
            )
            err.print(note, markup=False, soft_wrap=True)
        played: dict[str, Attack] = {}
        planned = [
            (mutant, mutant.digest(own_digest))
            for task in playable
            for own_digest in [judged_digest(task)]
            for mutant in (
                *sampled(mutants_to_play(task, runs_guests=runs_guests), own_digest, sample),
                *extra.get(task.task_id, ()),
            )
        ]
        if not any(mutant.family in (families or Family) for mutant, _ in planned):
            of = f" of {', '.join(family.value for family in families)}" if families else ""
            where = "" if runs_guests else "; those with shell commands are not played on drawn desktops"
            raise ConfigError(f"tasks attack: no mutants{of} to play{where}")
        digests = {digest for _, digest in planned}

        def is_wanted(mutant: Mutant, digest: str) -> bool:
            if digest not in digests:
                return False
            known = file.results.get(digest)
            if known is not None:
                played[digest] = known
            return (known is None or known.is_unscored) and mutant.family in (families or Family)

        advance = _progress(sum(is_wanted(mutant, digest) for mutant, digest in planned))

        def on_result(result: Attack) -> None:
            file.add(result)
            played[result.digest] = result
            advance()

        run_until_signal(
            attack(
                opening, playable, parallel_count=parallel_count, extra=extra, is_wanted=is_wanted, on_result=on_result
            )
        )
    report = AttackReport(results=list(played.values()), verdicts=reviewed)
    if passed is not None:
        write_passed(passed, playable, report, runs_guests=runs_guests)
    if html is not None:
        html.write_text(report.page(), encoding="utf-8")
    print_result(report, as_json=as_json)
