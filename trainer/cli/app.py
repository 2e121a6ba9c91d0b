"""The `trainer` command: what its subcommands are called."""

from importlib.metadata import version
from typing import Annotated

import typer

from trainer.cli import compare, data, evaluate, play, recipe
from trainer.cli.output import log_to_stderr, out

app = typer.Typer(
    name="trainer",
    no_args_is_help=True,
    # A traceback with local variables may hold a key, and is no way to tell a user what went wrong.
    pretty_exceptions_show_locals=False,
    help="Evaluate, compare and watch computer-use agents on the desktops that envd serves.",
)
app.command("eval")(evaluate.eval_command)
app.command("compare")(compare.compare_command)
app.command("play")(play.play_command)
app.add_typer(recipe.app, name="recipe")
app.add_typer(data.app, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"trainer {version('envd-trainer')}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on standard error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Take the flags that every command has."""
    log_to_stderr(verbose=verbose)
