"""The `envd` command: what its subcommands are called."""

from typing import Annotated

import typer

from envd.cli import certs, demo, doctor, image, osworld, serve, tokens
from envd.cli.bench.commands import app as bench_app
from envd.cli.output import out
from envd.cli.soak.commands import soak_command
from envd.cli.tasks.commands import app as tasks_app
from envd.cli.version import envd_version

app = typer.Typer(
    name="envd",
    no_args_is_help=True,
    # A traceback with local variables may hold a secret, and is no way to tell an operator what went wrong.
    pretty_exceptions_show_locals=False,
    help="Run pools of virtual desktops and serve them over gRPC.",
)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)
app.add_typer(image.app, name="image")
app.add_typer(tasks_app, name="tasks")
app.add_typer(osworld.app, name="osworld")
app.command("certs")(certs.certs)
app.add_typer(tokens.app, name="tokens")
app.command("demo")(demo.demo)
app.add_typer(bench_app, name="bench")
app.command("soak")(soak_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"envd {envd_version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Take the flags that every command has."""
