"""The command `envd tasks attack`."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, err
from envd.base.config import Config
from envd.base.terminal import print_result, reports_errors
from envd.bench.attack.mutants import Family, Mutant
from envd.bench.attack.playing import Attack, attack, attack_config
from envd.bench.attack.report import Report, ResultsFile, read_verdicts, write_passed
from envd.cli.options import runs_own_daemon
from envd.cli.tasks_verify import choose, image_of
from envd.daemon.ephemeral import ensure_image, run_until_signal
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.backends import backend_of
from envd.images.catalogue import ImageCatalogue
from envd.tasks.model import split_by_needs


@reports_errors
@runs_own_daemon("tasks")
def attack_command(
    settings: Config,
    *,
    task_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help="Task ids, or SUITE/ for a whole suite. Default: all with an oracle."),
    ] = None,
    suites: Annotated[
        list[str] | None, typer.Option("--suite", metavar="SUITE", help="The same as SUITE/; repeatable.")
    ] = None,
    families: Annotated[
        list[Family] | None, typer.Option("--family", help="Play only this kind of mutant; repeatable. Default: all.")
    ] = None,
    image: Annotated[str, typer.Option(help="Image to play on.", show_default="the tasks' own")] = "",
    parallel_count: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Mutants played at once.")] = 2,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of the results.")] = Path(
        "out/attack"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the results in the directory.")] = False,
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
    as_json: Json = False,
) -> None:
    """Play almost right solutions and cheats of each task, which a sound checker scores below 1, on forks."""
    wanted = [*(task_ids or []), *(f"{name.removesuffix('/')}/" for name in suites or [])]
    settings = with_suites(settings, wanted)
    chosen = [
        task for task in choose(load_tasks(settings, include_osworld=False), wanted) if task.oracle and task.checker
    ]
    reviewed = read_verdicts(files("envd.bench.attack") / "verdicts.yaml") | read_verdicts(verdicts)
    images = ImageCatalogue(settings.cache_dir)
    image = image or image_of(chosen, images)
    if not image:
        ensure_image(settings)
    chosen, unmet = split_by_needs(chosen, frozenset(images.get(image).provides) if image else frozenset())
    for task in unmet:
        err.print(f"{task.task_id} needs {', '.join(task.needs)}, which the image does not provide: skipped")
    own = attack_config(settings, parallel_count=parallel_count, image=image)
    with ResultsFile(out_dir / "results.jsonl", resume=resume) as file:
        played: dict[str, Attack] = {}

        def is_wanted(mutant: Mutant, digest: str) -> bool:
            if digest in file.results:
                played[digest] = file.results[digest]
            return digest not in file.results and mutant.family in (families or Family)

        def on_result(result: Attack) -> None:
            file.add(result)
            played[result.digest] = result

        run_until_signal(attack(own, chosen, parallel_count=parallel_count, is_wanted=is_wanted, on_result=on_result))
    report = Report(results=list(played.values()), verdicts=reviewed)
    if passed is not None:
        runs_guests = backend_of(settings.hypervisor.uri).capabilities.runs_guests
        write_passed(passed, chosen, report, runs_guests=runs_guests)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(report.page(), encoding="utf-8")
    print_result(report, as_json=as_json)
