"""`envd tokens`: creates tokens that clients authenticate with."""

from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit_json, out
from envd.api.security.tokens import new_token
from envd.cli.command import command

app = typer.Typer(no_args_is_help=True, help="Create tokens that clients authenticate with.")


@app.callback()
def root() -> None:
    """Create tokens that clients authenticate with."""


@app.command("new")
@command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client; episodes belong to it.")],
    *,
    scope: Annotated[str, typer.Option("--scope", help="read, run or admin.")] = "run",
    max_machines: Annotated[
        int | None,
        typer.Option(
            "--max-machines", metavar="N", min=1, max=999_999, help="Most machines that its episodes may hold."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token. It is printed once and not stored; the daemon's file has only its digest."""
    token = new_token(name, scope, max_machines=max_machines)
    if as_json:
        emit_json({"name": name, "scope": scope, "token": token.secret, "line": token.line})
        return
    lines = [
        "The token, for the client's ENVD_TOKEN; it is not shown again:",
        "",
        token.secret,
        "",
        "Its line, for the file of security.tokens_file (chmod 600):",
        "",
        token.line,
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
