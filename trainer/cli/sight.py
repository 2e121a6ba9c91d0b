"""`trainer sight`: check that the policy sees its pixels."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import out
from trainer.agent.types import ModelFailed
from trainer.cli.options import AgentFile, SlimeHome, read_settings, slime_checkout
from trainer.cli.output import UsageError, reports_errors
from trainer.learn import LearnError

#: Pictures that are cheap for a CPU.
SMALL = {"image_max_pixels": 65_536, "max_turns": 3, "prompt_tokens": 4096}


@reports_errors(LearnError, ModelFailed, OSError, ValueError)
def sight_command(
    *,
    agent: AgentFile = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Model for transformers; default: a small one with random weights.")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Engine or router that serves the model; default: this process.")
    ] = "",
    gateway: Annotated[bool, typer.Option("--gateway", help="Play through `trainer gateway`, without slime.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a PNG of what the learner is given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    slime_home: SlimeHome = None,
) -> None:
    """Check by drawn code words that engine and learner see the pixels of every turn. Exits with 1 if they do not."""
    host, _, port = engine.rpartition(":")
    if engine and not (host and port.isdigit()):
        raise UsageError(f"--engine {engine}: not an address; use HOST:PORT")
    if gateway:
        from trainer.gateway.sight import examine  # noqa: PLC0415 -- torch: seconds
    else:
        from trainer.learn.sight import examine as examine_slime  # noqa: PLC0415 -- torch: seconds

        examine = partial(examine_slime, slime_checkout(slime_home))
    report = examine(
        agent=read_settings(agent, **({} if agent else SMALL)),
        checkpoint=checkpoint,
        engine=(host, int(port)) if engine else None,
        picture=picture,
    )
    if as_json:
        out.print_json(json.dumps(asdict(report)))
    else:
        out.print(str(report), markup=False)
    if report.findings:
        raise typer.Exit(1)
