"""`trainer bench`: measure the trainer's own cost."""

import json
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    slime_home: SlimeHome = None,
) -> None:
    """Measure CPU time, bytes and memory of a turn: slime's rollout code, drawn desktops, an engine without a model."""
    home = slime_checkout(slime_home)
    from trainer.learn.rollout_bench import measure  # noqa: PLC0415 -- torch: seconds

    report = measure(home, episodes=episodes, turns=turns)
    if as_json:
        out.print_json(json.dumps(report))
        return
    for name, value in report["results"].items():
        out.print(f"{name}: {'not measured' if value is None else f'{value:,.2f}'}", markup=False)
