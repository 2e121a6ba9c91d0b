"""`trainer bench`: measure the trainer's own cost."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import out
from trainer.cli.options import SlimeHome, slime_checkout
from trainer.cli.output import reports_errors
from trainer.learn import LearnError

app = typer.Typer(no_args_is_help=True, help="Measure the trainer's own cost: a turn of a rollout.")


@app.callback()
def group() -> None:
    """Make `rollout` a subcommand although it is the only one."""


@app.command()
@reports_errors(LearnError, OSError)
def rollout(
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
    from trainer.learn.rollout_bench import measure  # noqa: PLC0415 -- torch: seconds

    picture_dir = picture_dir and str(Path(picture_dir).resolve())
    report = measure(home, episodes=episodes, turns=turns, picture_dir=picture_dir, workers=workers)
    if as_json:
        out.print_json(json.dumps(report))
        return
    for name, value in report["results"].items():
        out.print(f"{name}: {value:,.2f}", markup=False)
