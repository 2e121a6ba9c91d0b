"""Every command line of `envd` and `trainer` in the docs names existing commands and options."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import envd.cli.app
import trainer.cli.app
from cuaenv.cli.lazy import LazyCommand

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
GROUPS = {"envd": typer.main.get_command(envd.cli.app.app), "trainer": typer.main.get_command(trainer.cli.app.app)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:envd|trainer) [a-z][^`]*)`")
#: Words that stand for several or for anything.
OPEN = re.compile(r"[|*…]|\.\.\.|[A-Z]{2,}|[<>{}]")


def command_lines(page: Path) -> Iterator[str]:
    """Yield the command lines of a page, without what a shell adds."""
    text = page.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language not in {"bash", "sh", "console"}:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:&&|\||;|>|2>)\s", line.split(" #")[0].replace("[", " ").replace("]", " ")):
                words = part.split()
                while words and (re.fullmatch(r"[A-Z_]+=\S*|sudo|docker|time|exec|\$", words[0])):
                    words.pop(0)
                if words and Path(words[0]).name in GROUPS and words[1:]:
                    yield " ".join([Path(words[0]).name, *words[1:]])
    yield from INLINE.findall(FENCE.sub("", text))


LINES = [(page, line) for page in PAGES for line in dict.fromkeys(command_lines(page))]


def problem(line: str) -> str:
    """Return what of a command line does not exist; empty if all of it does."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe of the text around it
        words = line.split()
    command: Any = GROUPS[words.pop(0)]
    context: Any = None
    while hasattr(command, "get_command") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if OPEN.search(name):
            return ""
        found = command.get_command(context, name)
        if found is None:
            return f"{command.name} has no command {name}"
        command = found.load() if isinstance(found, LazyCommand) else found
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    for word in words:
        if word == "--":
            break
        if word.startswith("-") and (option := word.partition("=")[0]) not in options and not OPEN.search(option):
            if re.fullmatch(r"-{1,2}\d.*|-", option):
                continue
            return f"{command.name} has no option {option}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_command_lines_exist(page: Path) -> None:
    problems = {line: found for where, line in LINES if where == page if (found := problem(line))}
    assert problems == {}


def test_the_pages_have_command_lines() -> None:
    assert len(LINES) > 150
