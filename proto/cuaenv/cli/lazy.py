"""Lazily imported commands: importing all of them would delay each command and completion by about a second."""

import gc
import inspect
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from cuaenv.problems import plain


class LazyCommand(TyperCommand):
    """Placeholder of a command or a group: imports it when it is run or completed."""

    def __init__(self, name: str, *, target: str, summary: str) -> None:
        """Create a command.

        Args:
            target: `MODULE:ATTRIBUTE` of a function, which may have `context_settings`, or of a `typer.Typer`.
            summary: The first paragraph of its help, which is all that a list of commands shows.
        """
        super().__init__(name, help=summary)
        self._target = target

    # The class of a context, and of what `load` returns, is typer's own or click's, depending on typer's release.
    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Return the context of the real command, which then runs, completes or prints its help."""
        return self.load().make_context(info_name, args, *rest, **extra)

    def load(self) -> Any:
        module, _, attribute = self._target.partition(":")
        found = getattr(_imported(module), attribute)
        if isinstance(found, typer.Typer):
            return _tidied(get_group(found))
        alone = typer.Typer(add_completion=False)
        alone.command(self.name, context_settings=getattr(found, "context_settings", None))(found)
        return _tidied(get_command(alone))


def _imported(name: str) -> ModuleType:
    """Return a module. Garbage collections find nothing in it, and take a quarter of the time of a daemon's start."""
    if name in sys.modules:
        return sys.modules[name]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _tidied(command: Any) -> Any:
    """Return a command whose help shows switches without a value, `<bool>`, and paragraphs without line breaks."""
    command.help = re.sub(r"(?<!\n)\n(?=\S)(?!- )", " ", inspect.cleandoc(command.help or ""))
    for option in [*command.params, command.get_help_option(typer.Context(command))]:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _tidied(each)
    return command


def lazy_group(commands: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """Return a class for `typer.Typer(cls=...)` with these commands: name -> (target, summary), see `LazyCommand`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, (target, summary) in commands.items():
                self.add_command(LazyCommand(name, target=target, summary=summary))

        def format_help(self, ctx: Any, formatter: Any) -> None:
            """Print the help, tidied; typer adds options of its own after `__init__`."""
            _tidied(self)
            super().format_help(ctx, formatter)

        def invoke(self, ctx: Any) -> Any:
            """Run the command; a wrong value is reported without pydantic's phrases, which typer has from it."""
            try:
                return super().invoke(ctx)
            except typer.BadParameter as error:
                error.message = plain(error.message)
                raise

    return LazyGroup
