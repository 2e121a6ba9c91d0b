"""The `envd` command and its subcommands."""

from typing import Annotated

import typer

from cuaenv.cli.lazy import lazy_group
from envd.base.version import envd_version

_COMMANDS = {
    "serve": (
        "envd.cli.serve:serve",
        "Serve pools of desktops over gRPC. SIGTERM or Ctrl-C drains; a second signal ends all episodes.",
    ),
    "doctor": ("envd.cli.doctor:doctor", "Check this host, and show how to fix each problem."),
    "certs": ("envd.cli.certs:certs", "Create a development CA with certificates for a server and a client."),
    "quickstart": (
        "envd.cli.quickstart:quickstart",
        "Serve drawn desktops, play one episode, and show what to do next: a minute, without root or an image.",
    ),
    "demo": (
        "envd.cli.demo:demo",
        "Fork four desktops from one task state, branch two of them, and check every reward.",
    ),
    "image": ("envd.cli.image:app", "Build, import and list guest images."),
    "tasks": ("envd.cli.tasks:app", "Inspect the tasks that clients can request."),
    "suite": ("envd.cli.suite:app", "Record what the scores of a suite depend on, and find changes."),
    "top": ("envd.cli.top:top", "Watch the pools, the queue and the episodes of running daemons."),
    "episodes": (
        "envd.cli.episodes:app",
        "List, show and close the episodes of a running daemon; export recorded ones.",
    ),
    "checkpoints": (
        "envd.cli.checkpoints:app",
        "List, open, delete, export and import checkpoints: states of episodes that outlive them.",
    ),
    "forward": ("envd.cli.forward:forward", "Forward a local port to a port of an episode's guest."),
    "compat": ("envd.cli.compat:compat", "Serve a protocol of another system on the desktops of a daemon."),
    "web": ("envd.cli.web:app", "Recordings of the web pages that guests open, to replay without a network."),
    "osworld": ("envd.cli.osworld:app", "OSWorld's tasks, with its own setup and evaluators."),
    "deploy": ("envd.cli.deploy:app", "Show or copy units, alert rules, dashboards, manifests and settings."),
    "tokens": ("envd.cli.tokens:app", "Create tokens that clients authenticate with."),
    "bench": ("envd.cli.bench:app", "Measure forks, branches, checkpoints, steps and episodes."),
}

app = typer.Typer(
    name="envd",
    cls=lazy_group(_COMMANDS),
    no_args_is_help=True,
    # Local variables in a traceback may contain secrets.
    pretty_exceptions_show_locals=False,
    help="Run pools of virtual desktops and serve them over gRPC.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"envd {envd_version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options of `envd` itself."""
