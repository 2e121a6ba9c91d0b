"""`python -m tests.tools.learning`: compare runs, draw a task before and after, measure a turn of a rollout."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import err, out
from tests.tools.learning.comparison import write_comparison
from tests.tools.learning.kept import kept
from tests.tools.learning.replay import choose_task, draw, play
from tests.tools.learning.rollout_bench import measure
from tests.tools.learning.solved import BY_BASE, solved
from trainer.cli.options import SlimeHome, slime_checkout
from trainer.cli.output import reports_errors
from trainer.config import InputError
from trainer.learn import LearnError
from trainer.learn.daemons import started_daemons
from trainer.learn.settings import SMOKE, Settings

app = typer.Typer(no_args_is_help=True, help="Programs about `trainer learn` that need a checkout.")


@app.command("compare")
@reports_errors(LearnError, OSError)
def compare_command(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories of `trainer learn`.")],
    directory: Annotated[Path | None, typer.Option("--out", help="Default: `report` in the first run.")] = None,
) -> None:
    """Write the report of `trainer learn` with the control and the arms of ablations."""
    directory = directory or runs[0] / "report"
    write_comparison([path.expanduser().resolve() for path in runs], directory)
    err.print(f"{directory} has results.json and plots", markup=False, soft_wrap=True)


@app.command("pack")
@reports_errors(LearnError, OSError)
def pack_command(
    *,
    stage: Annotated[Path, typer.Argument(metavar="STAGE", help="Of a run, such as `clone` or `reading-0`.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the weights.")],
) -> None:
    """Write the policy of a stage as `base.checkpoint` takes it: with 8 bits a weight."""
    from trainer.learn.checkpoint import pack_checkpoint
    from trainer.learn.states import load_state

    if (state := load_state(stage, None, stage=stage.name)) is None:
        raise LearnError(f"{stage} has no saved policy; name a directory of a run with state.pt")
    pack_checkpoint(stage.resolve().parent / "demos" / "model", state.model, directory)
    out.print(str(directory), markup=False, soft_wrap=True)


@app.command("kept")
@reports_errors(InputError)
def kept_command(
    *,
    drawn: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Results on drawn tasks; once for each policy: before, then after."),
    ],
    real: Annotated[list[Path], typer.Option(metavar="FILE", help="Those of the same policies on real widgets.")],
) -> None:
    """Print success on drawn and real widgets, and which share of the gain is kept, as JSON."""
    out.print_json(json.dumps(kept(drawn, real)))


@app.command("solved")
@reports_errors(LearnError, OSError)
def solved_command(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory with the seeds of the stage rl.")],
    control: Annotated[Path | None, typer.Option(metavar="RUN", help="Run directory of the control.")] = None,
    by_base: Annotated[
        list[str], typer.Option(metavar="TEMPLATE", help="Template that the base solves, counted apart; repeat it.")
    ] = list(BY_BASE),  # noqa: B006 -- typer copies it
) -> None:
    """Print success on held-out tasks before and after, of all seeds together and of each, as JSON."""
    out.print_json(json.dumps(solved(run, control=control, by_base=by_base)))


@app.command("replay")
@reports_errors(LearnError, OSError)
def replay_command(
    *,
    run: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("out/learn"),
    name: Annotated[str, typer.Option(help="Directory of the stage rl in the run.")] = "rl-0",
    task: Annotated[
        str, typer.Option(help="The task; default: a held-out one that the run failed first and solved last.")
    ] = "",
    config: Annotated[list[Path] | None, typer.Option(help="YAML file of settings, as for `trainer learn`.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The settings of `trainer learn --smoke`.")] = False,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    envd: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A running daemon with the task; default: drawn desktops.")
    ] = "",
    slime_home: SlimeHome = None,
) -> None:
    """Play a task by the cloned policy and by that of the stage `rl`, and draw both as a GIF."""
    slime, run = slime_checkout(slime_home), run.expanduser().resolve()
    settings = (SMOKE if smoke else Settings()).changed(*config or [])
    settings = settings.model_copy(update={"workers": 1, "machines": 2})
    task = task or choose_task(run / name)
    with ExitStack() as running:
        host = envd or running.enter_context(started_daemons(run / "daemons" / "replay", settings))[0]
        before, after = play(settings, run=run, name=name, task=task, host=host, slime_home=slime, seed=seed)
    path = run / "report" / f"replay-{re.sub('[^a-z0-9]+', '-', task)}.gif"
    draw(path, [("cloned", before), ("after reinforcement", after)])
    out.print(str(path), markup=False, soft_wrap=True)


@app.command("rollout-bench")
@reports_errors(LearnError, OSError)
def rollout_bench_command(
    *,
    episodes: Annotated[int, typer.Option(min=1, max=256, help="Concurrent episodes.")] = 16,
    turns: Annotated[int, typer.Option(min=6, help="Turns of each episode.")] = 30,
    picture_dir: Annotated[str, typer.Option(help="Send pictures as files in this directory.")] = "",
    workers: Annotated[int, typer.Option(min=0, max=64, help="Compare this many worker processes with none.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    slime_home: SlimeHome = None,
) -> None:
    """Measure CPU time, bytes and memory of a turn: slime's rollout code, drawn desktops, an engine without a model."""
    home = slime_checkout(slime_home)
    picture_dir = picture_dir and str(Path(picture_dir).resolve())
    report = measure(home, episodes=episodes, turns=turns, picture_dir=picture_dir, workers=workers)
    if as_json:
        out.print_json(json.dumps(report))
        return
    for name, value in report["results"].items():
        out.print(f"{name}: {value:,.2f}", markup=False)


if __name__ == "__main__":
    app()
