"""Lazily imported commands: their placeholders show the same help as the commands."""

import subprocess
import sys

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import envd.cli.app
import trainer.cli.app
from cuaenv.cli.lazy import LazyCommand
from envd.cli.image_build import app as build_app
from envd.cli.tasks import app as tasks_app

APPS = {
    "envd": envd.cli.app.app,
    "trainer": trainer.cli.app.app,
    "envd tasks": tasks_app,
    "envd image build": build_app,
}
HEAVY = ("aiohttp", "grpc", "libvirt", "numpy", "pyarrow", "pydantic")
LAZY = [
    (name, command)
    for name, app in APPS.items()
    for command in vars(get_command(app))["commands"].values()
    if isinstance(command, LazyCommand)
]


def modules_loaded_by(*words: str) -> set[str]:
    """Return the modules that a fresh interpreter imports for a command line."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]\ntry: runpy.run_module(sys.argv[0], run_name='__main__')\n"
    code += "finally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=240)
    assert words[0] in done.stdout
    return set(done.stderr.split())


def test_all_commands_of_both_programs_are_lazy() -> None:
    lazy = {f"{program} {command.name}" for program, command in LAZY}
    assert lazy >= {"envd serve", "envd doctor", "envd image", "envd tasks", "envd bench", "envd tasks verify"}
    assert lazy >= {"trainer eval", "trainer compare", "trainer play", "trainer recipe", "trainer data"}


@pytest.mark.parametrize(("program", "command"), LAZY, ids=[f"{name} {command.name}" for name, command in LAZY])
def test_the_list_of_commands_shows_the_first_line_of_each_commands_help(program: str, command: LazyCommand) -> None:
    own = command.load()
    first_paragraph = own.help.split("\n\n")[0].replace("\n", " ")
    assert (command.help, command.get_short_help_str()) == (first_paragraph, own.get_short_help_str())
    assert own.name in {command.name, ""}
    assert (own.hidden, own.deprecated, own.short_help) == (False, False, None)


@pytest.mark.parametrize("program", ["envd", "trainer"])
def test_help_imports_no_heavy_modules(program: str) -> None:
    assert modules_loaded_by(program, "--help").isdisjoint(HEAVY)


@pytest.mark.parametrize("app", [envd.cli.app.app, trainer.cli.app.app], ids=["envd", "trainer"])
def test_an_unknown_command_is_refused_with_a_suggestion(app: typer.Typer) -> None:
    name = "serv" if app is envd.cli.app.app else "recip"
    refused = CliRunner().invoke(app, [name])
    assert refused.exit_code == 2
    assert f"No such command '{name}'. Did you mean '{name}e'?" in " ".join(refused.output.replace("│", " ").split())


def complete(program: str, words: str) -> list[str]:
    """Return the shell completions of a command line."""
    variables = {
        f"_{program.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    app = envd.cli.app.app if program == "envd" else trainer.cli.app.app
    return CliRunner().invoke(app, env=variables, prog_name=program).output.split()


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("envd", "envd se", ["serve"]),
        ("envd", "envd serve --listen --hyp", ["--hypervisor"]),
        ("envd", "envd tasks ve", ["verify"]),
        ("envd", "envd tasks verify --par", ["--parallel"]),
        ("trainer", "trainer recipe co", ["config"]),
    ],
)
def test_shells_complete_commands_and_their_flags(program: str, words: str, expected: list[str]) -> None:
    assert complete(program, words) == expected


def test_a_group_prints_its_help_and_runs_its_commands() -> None:
    shown = CliRunner().invoke(envd.cli.app.app, ["tasks", "verify", "--help"], prog_name="envd")
    assert shown.exit_code == 0
    assert "Usage: envd tasks verify [OPTIONS]" in shown.output
    bare = CliRunner().invoke(envd.cli.app.app, ["tasks"], prog_name="envd")
    assert (bare.exit_code, "Usage: envd tasks [OPTIONS] COMMAND" in bare.output) == (2, True)


@pytest.mark.parametrize("words", ["", "top", "tasks list", "episodes close"])
def test_help_shows_no_value_for_switches(words: str) -> None:
    result = CliRunner().invoke(envd.cli.app.app, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
    assert "<bool>" not in result.output


def test_help_joins_lines_and_a_wrong_number_is_refused_in_plain_words() -> None:
    result = CliRunner().invoke(envd.cli.app.app, ["tasks", "list", "--help"], terminal_width=80)
    assert "TASK?seed=N is another. A terminal shows the beginning of each instruction." in result.output
    result = CliRunner().invoke(envd.cli.app.app, ["bench", "fork", "--n", "x"], terminal_width=80)
    assert result.exit_code == 2
    assert "'--n': must be a valid integer  " in result.output


@pytest.mark.parametrize(("module", "ends"), [("colorsys", "loaded"), ("no_such_module", "missing")])
@pytest.mark.parametrize("was_enabled", [True, False])
def test_an_import_leaves_garbage_collection_on_or_off_and_its_objects_are_left_out(
    was_enabled: bool, module: str, ends: str
) -> None:
    code = f"""
import gc
from cuaenv.cli.lazy import LazyCommand
if not {was_enabled}:
    gc.disable()
try:
    LazyCommand("x", target="{module}:rgb_to_hls", summary="").load()
    print("loaded", end=" ")
except ModuleNotFoundError:
    print("missing", end=" ")
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == [ends, str(was_enabled), "True"]
