"""The PowerShell scripts for Windows guests: they parse, and use only cmdlets of 5.1.

No PowerShell runs here. A parser rejects unbalanced quotes and braces; the rest is compared with lists.
"""

import ast
import base64
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tree_sitter_c_sharp
from tree_sitter import Language, Node, Parser

from envd.guests.powershell import Script, powershell, source
from tests.support.powershell_tree import nodes, parse, text

ENVD = Path(__file__).parents[4] / "envd"
SCRIPTS = ENVD / "guests" / "powershell"
#: The wrapper of scripts that need the desktop is part of their commands.
each_file = pytest.mark.parametrize("script", [*Script, "in-session", "run-command"])
each_script = pytest.mark.parametrize("script", Script)

#: Cmdlets of Windows PowerShell 5.1 that scripts may use, by their full names: profiles can redefine aliases.
CMDLETS = {
    "Add-Type",
    "ConvertFrom-Json",
    "ConvertTo-Json",
    "Export-Clixml",
    "Get-ChildItem",
    "Get-CimInstance",
    "Get-Item",
    "Get-Location",
    "Get-Process",
    "Get-Variable",
    "Import-Clixml",
    "New-Item",
    "Out-Null",
    "Remove-Item",
    "Select-Object",
    "Set-Location",
    "Set-Variable",
    "Split-Path",
    "Stop-Process",
    "Test-Path",
}
C_SHARP = Parser(Language(tree_sitter_c_sharp.language()))
AUTOMATIC = {"$null", "$true", "$false", "$_", "$PSHOME", "$input", "$request", "$runner"}
#: Automatic variables, to which a script must not assign.
RESERVED = {"$args", "$error", "$event", "$home", "$host", "$input", "$matches", "$pid", "$profile", "$pwd", "$sender"}
#: CreateProcess accepts 32,767 characters; values take the rest.
MAX_COMMAND_CHARS = 16_000


@cache
def tree(script: str) -> Node:
    return parse(source(script))


def given(script: str) -> list[str]:
    """Return the variables that a script's comment declares: `Given: $a, $b.`."""
    comments = " ".join(text(node).lstrip("# ") for node in nodes(tree(script), "comment"))
    _, _, declared = comments.partition("Given: ")
    return [name.strip("$") for name in declared.partition(".")[0].split(", ")] if declared else []


def modules(text: str) -> list[Path]:
    """Return the daemon's modules that contain a text."""
    return [path for path in ENVD.rglob("*.py") if text in path.read_text()]


def calls() -> Iterator[tuple[Script, set[str]]]:
    """Yield the script and the names of the values of every call in the daemon that is given a script."""
    for path in modules("Script."):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            for argument in node.args:
                if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "Script":
                    yield Script[argument.attr], {str(keyword.arg) for keyword in node.keywords if keyword.arg}


def test_every_file_is_a_script_and_every_script_a_file() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.ps1")} == {*Script, "in-session", "run-command"}


@each_script
def test_a_command_begins_with_the_name_of_its_script(script: Script) -> None:
    assert source(script).startswith(f"# envd: {script}\n")
    assert powershell(script)[-1].startswith(f"# envd: {script}\n")


@each_file
def test_a_script_parses(script: str) -> None:
    assert not tree(script).has_error, tree(script)
    assert source(script).isascii()


@each_script
def test_a_whole_command_parses_and_is_short(script: Script) -> None:
    values = dict.fromkeys(given(script), 'it\'s ‘that’\n"$x"')
    command = powershell(script, **values)[-1]
    assert not parse(command).has_error
    assert len(command) < MAX_COMMAND_CHARS


def encoded_chars(text: str) -> int:
    """Return the length of a text as `-EncodedCommand` takes it."""
    return len(base64.b64encode(text.encode("utf-16-le")))


def test_commands_that_scripts_start_fit_into_a_command_line() -> None:
    assert encoded_chars(source("run-command")) < 8000, "cmd.exe accepts 8,191 characters"
    assert encoded_chars(source("use-tool") + source("run-command") + "_" * 1000) < 32_000


@pytest.mark.parametrize("script", ["in-session", "list-windows", "type-text"])
def test_the_c_sharp_in_a_script_parses(script: str) -> None:
    [code] = [text(node)[3:-3] for node in nodes(tree(script), "verbatim_here_string_characters")][:1]
    assert not C_SHARP.parse(code.encode()).root_node.has_error


@each_file
def test_a_script_uses_cmdlets_by_their_full_names(script: str) -> None:
    functions = {text(node) for node in nodes(tree(script), "function_name")}
    assert {text(node) for node in nodes(tree(script), "command_name")} <= CMDLETS | functions


@each_file
def test_a_script_reads_only_variables_that_it_is_given_or_assigns(script: str) -> None:
    assigned = {text(node) for node in nodes(tree(script), "left_assignment_expression")}
    assigned |= {text(node) for loop in nodes(tree(script), "foreach_statement") for node in loop.children[2:3]}
    assigned |= {text(node) for node in nodes(tree(script), "script_parameter")}
    used = {text(node).replace("{", "").replace("}", "") for node in nodes(tree(script), "variable")}
    values = {f"${name}" for name in given(script)}
    assert values <= used
    assert {name for name in used if not name.startswith("$env:")} - values - assigned <= AUTOMATIC
    assert not {name.lower() for name in assigned | values} & RESERVED


def test_every_call_gives_a_script_its_values() -> None:
    found = list(calls())
    assert {script for script, _ in found} == set(Script)
    assert [(script, names) for script, names in found if names != set(given(script))] == []


def test_values_are_literals() -> None:
    command = powershell(Script.REMOVE, path='C:\\it\'s ‘$here’ "now"\n')[-1]
    assert "\n$path = 'C:\\it''s ‘‘$here’’ \"now\"\n'\n" in command
