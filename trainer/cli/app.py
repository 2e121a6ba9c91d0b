"""The `trainer` command and its subcommands."""

from importlib.metadata import version
from typing import Annotated

import typer

from cuaenv.cli.lazy import lazy_group

_COMMANDS = {
    "eval": (
        "trainer.cli.evaluate:eval_command",
        "Evaluate a model on a daemon's tasks, or compare two: trainer eval --before URL --after URL.",
    ),
    "compare": (
        "trainer.cli.compare:compare_command",
        "Compare two evaluations, paired by task: the change of the success rate with its interval.",
    ),
    "play": (
        "trainer.cli.play:play_command",
        "Play one episode and show observations, replies, actions and the score.",
    ),
    "mcp": ("trainer.cli.mcp:mcp_command", "Serve desktops as MCP tools: reset, step, observe, evaluate, close."),
    "recipe": ("trainer.cli.recipe:app", "List the training recipes and show their configuration."),
    "data": ("trainer.cli.data:app", "Create training data: prompts, demonstrations, data sets."),
    "sight": (
        "trainer.cli.sight:sight_command",
        "Check by drawn code words that engine and learner see the pixels of every turn. Exits with 1 if they do not.",
    ),
    "gateway": (
        "trainer.cli.gateway:gateway_command",
        "Serve OpenAI's and Anthropic's APIs before an engine, and record the exact tokens of each session.",
    ),
    "hosts": ("trainer.cli.hosts:app", "Start, show and drain the KVM hosts of a Ray cluster."),
    "learn": (
        "trainer.cli.learn:learn_command",
        "Learn on one GPU from drawn desktops: demonstrations, cloning, reinforcement, report.",
    ),
}

app = typer.Typer(
    name="trainer",
    cls=lazy_group(_COMMANDS),
    no_args_is_help=True,
    # Local variables in a traceback may contain a key.
    pretty_exceptions_show_locals=False,
    help="Evaluate, compare and watch computer-use agents on the desktops that envd serves.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainer {version('envd-trainer')}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Parse the flags that all commands share."""
    from trainer.cli.output import log_to_stderr  # noqa: PLC0415 -- imports the client, which --help does not need

    log_to_stderr(verbose=verbose)
