"""The decorator of envd's commands, and the tables of those that list something."""

import json
from typing import Annotated, Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from cuaenv.cli.terminal import Json, out
from envd.base.errors import ConfigError, EpisodeNotFound
from envd.cli.command import Argument, command
from envd.cli.terminal import columns

Name = Annotated[str | None, typer.Option("--name", help="A name.")]


def greeting(given: dict[str, Any]) -> str:
    if given["name"] == "unknown-name":
        raise ConfigError("--name unknown-name: unknown")
    return f"hello {given['name']}"


GREETING = Argument(options={"name": Name}, make=greeting)


def app_of(function: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return app


@command(GREETING)
def greet(text: str, *, times: Annotated[int, typer.Option("--times")] = 1, as_json: Json = False) -> None:
    """Greet somebody."""
    if times < 1:
        raise EpisodeNotFound("no one listens")
    print(json.dumps({"text": text}) if as_json else " ".join([text] * times))


def test_the_options_of_an_argument_take_its_place_with_json_last() -> None:
    result = CliRunner().invoke(app_of(greet), ["--name", "you", "--times", "2"])
    assert (result.exit_code, result.output) == (0, "hello you hello you\n")
    shown = CliRunner().invoke(app_of(greet), ["--help"]).output
    places = [shown.index(text) for text in ("Greet somebody.", "--times", "--name", "--json")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("arguments", "status", "reason", "message"),
    [
        (["--name", "unknown-name"], 2, "CONFIG_ERROR", "--name unknown-name: unknown"),
        (["--times", "0"], 1, "EPISODE_NOT_FOUND", "no one listens"),
    ],
)
def test_errors_of_argument_and_command_are_reported_alike(
    arguments: list[str], status: int, reason: str, message: str
) -> None:
    result = CliRunner().invoke(app_of(greet), [*arguments, "--json"])
    assert result.exit_code == status
    assert json.loads(result.stdout) == {"error": {"reason": reason, "message": message}}
    assert result.stderr == f"error: {message}\n"


def test_a_command_without_an_argument_has_its_own_parameters() -> None:
    @command()
    def show(name: Annotated[str, typer.Argument()], *, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        print(name.upper() if loud else name)

    assert CliRunner().invoke(app_of(show), ["x", "--loud"]).output == "X\n"


def test_a_command_has_the_options_and_the_help_of_another_function() -> None:
    def measure(count: int, *, size: Annotated[int, typer.Option("--size", help="How large.")] = 3) -> int:
        """Measure something."""
        return count * size

    @command(GREETING, options_of=measure)
    def run(text: str, *, as_json: Json = False, **options: Any) -> None:
        print(text, measure(2, **options), as_json)

    app = app_of(run)
    assert "Measure something." in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["--name", "x", "--size", "5"]).output == "hello x 10 False\n"


def test_a_table_shows_text_as_it_is_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[str, str, str | Text]] = [("[red]a", "1", Text("own")), ("b\x1b[2J", "20", "c")]
    out.print(columns(("name", "count", "note"), rows, right=("count",)))
    assert capsys.readouterr().out.splitlines() == [
        "name    count  note",
        "[red]a      1  own",
        "b\N{REPLACEMENT CHARACTER}[2J      20  c",
    ]
