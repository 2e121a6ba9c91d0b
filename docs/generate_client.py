"""The text of docs/client-reference.md, from the docstrings of the client."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from cuaenv import client
from cuaenv.actions import Action

_CLASSES: dict[str, list[type]] = {
    "Clients": [client.AsyncEnvClient, client.Tls, client.RetryPolicy],
    "Episodes": [client.AsyncEpisode],
}
_DATA = {
    "Options": [client.View, client.Settle, client.Perturb],
    "Results": [
        client.Observation,
        client.Element,
        client.StepResult,
        client.Handover,
        client.ScreenChange,
        client.ToolResult,
        client.UnrecordedRequest,
        client.State,
        client.Evaluation,
        client.Check,
        client.CommandResult,
        client.Origin,
        client.PortForward,
        client.Server,
        client.Task,
        client.Pool,
        client.QueuedGroup,
        client.EpisodeInfo,
        client.Checkpoint,
        client.ClientStatistics,
        client.HostStatistics,
    ],
}
#: Public for other modules of the client only.
_INTERNAL = {"accept", "chosen_view", "credentials", "defaults"}


def text() -> str:
    """Return the text of the page as Markdown."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    for title, kinds in _CLASSES.items():
        yield from (f"## {title}", "")
        for kind in kinds:
            yield from _class(kind)
    yield from ("## Actions", "", "| action | |", "|---|---|")
    for kind in get_args(Action):
        parameters = inspect.signature(kind).replace(return_annotation=inspect.Signature.empty)
        yield f"| `{kind.__name__}{_cell(_short(str(parameters)))}` | {_cell(_text(kind))} |"
    yield ""
    for title, kinds in _DATA.items():
        yield from (f"## {title}", "")
        for kind in kinds:
            yield from _class(kind)
    yield from ("## Errors", "", "| error | |", "|---|---|")
    yield from _errors(client.EnvError, "")


def _class(kind: type) -> Iterator[str]:
    yield from (f"### {kind.__name__}", "", _text(kind), "")
    comments = {name: text for name, text in _comments(kind).items() if not name.startswith("_")}
    if is_dataclass(kind):
        yield from ("| field | type and default | |", "|---|---|---|")
        for field in fields(kind):
            default = "" if field.default is MISSING else f" = {field.default!r}"
            declared = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
            yield f"| `{field.name}` | `{_cell(_short(declared + default))}` | {_cell(comments.get(field.name, ''))} |"
        yield ""
    elif issubclass(kind, Enum):
        yield from (f"- `{member.name}`: {comments[member.name]}" for member in kind)
        yield ""
    else:
        yield from (
            f"- `{name}`" + (f": {text}" if text else "") for name, text in comments.items() if name not in _INTERNAL
        )
        yield ""
    members = itertools.chain.from_iterable(
        vars(each).items() for each in kind.__mro__ if each.__module__ != "builtins"
    )
    for name, member in members:
        getter = getattr(member, "func", None) or getattr(member, "fget", None)
        if name in _INTERNAL:
            continue
        if name == "__init__" and not is_dataclass(kind) and member.__doc__:
            yield from _method(kind.__name__, member)
        elif inspect.isfunction(member) and member.__doc__ and not name.startswith("_"):
            yield from _method(name, member)
        elif getter is not None and not name.startswith("_"):
            yield from (f"`{name}`: {_text(getter)}", "")


def _method(name: str, method: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(method)
    call = name + _short(str(signature.replace(parameters=list(signature.parameters.values())[1:])))
    if inspect.iscoroutinefunction(inspect.unwrap(method)):
        call = f"await {call}"
    elif " -> Opening[" in call:
        call = re.sub(r" -> Opening\[(.*)\]$", r" -> \1", f"await {call}")
    elif inspect.isasyncgenfunction(inspect.unwrap(method)) and hasattr(method, "__wrapped__"):
        call = re.sub(r" -> \w+\[(.*)\]$", r" as \1", f"async with {call}")
    lines = textwrap.wrap(call.removesuffix(" -> None"), 110, subsequent_indent="    ", break_long_words=False)
    yield from (f"#### {name}", "", "```python", *lines, "```", "")
    text, *sections = re.split(r"\n\n(?=Args:|Raises:)", inspect.getdoc(method) or "")
    if hasattr(method, "__signature__"):
        text, sections = f"{text} Arguments and errors are those of [reset_group](#reset_group).", []
    yield from (text, "")
    for section in sections:
        heading, _, entries = re.sub(r"\n {5,}", " ", section.rstrip()).partition("\n")
        yield from (heading, "", *(f"- {_entry(line.strip())}" for line in entries.splitlines()), "")


def _entry(line: str) -> str:
    names, _, text = line.partition(": ")
    text = text.replace("See the module's tree", "See [Errors](#errors)")
    return ", ".join(f"`{name}`" for name in names.split(", ")) + f": {text}"


def _errors(kind: type, indent: str) -> Iterator[str]:
    yield f"| {indent}`{kind.__name__}` | {_cell(_text(kind))} |"
    children: list[type] = kind.__subclasses__()
    for child in children:
        if child.__name__ in client.__all__:
            yield from _errors(child, indent + "&nbsp;&nbsp;&nbsp;")


def _comments(kind: type) -> dict[str, str]:
    """Return the text of each documented field: the string after it, or the comment `#:` before it."""
    source = _source(kind)
    found = dict(re.findall(r"#: (.*)\n\s+(\w+) = ", source))
    comments = {name: text for text, name in found.items()}
    for body in [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]:
        for field, text in pairwise([*body, ast.Pass()]):
            target = field.targets[0] if isinstance(field, ast.Assign) else getattr(field, "target", None)
            name = getattr(target, "id", "") if isinstance(field, ast.AnnAssign) else ""
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                name = target.attr
            if name and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                comments[name] = " ".join(str(text.value.value).split())
            elif name:
                comments.setdefault(name, "")
    return comments


def _source(kind: type) -> str:
    """Return the source of a class, which names the package that exports it as its module."""
    files = [path for path in Path(client.__path__[0]).parent.rglob("*.py") if "_pb2" not in path.name]
    for text in (file.read_text(encoding="utf-8") for file in files):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                return str(ast.get_source_segment(text, node))
    raise LookupError(kind.__name__)


def _text(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _short(text: str) -> str:
    """Return annotations and defaults without the modules of names, and with readable durations."""
    text = re.sub(r"\b(?:[a-z_][a-z_0-9]*\.)+(?=\w)", "", text)
    text = re.sub(r"timedelta\(microseconds=(\d+)000\)", r"timedelta(milliseconds=\1)", text)
    return re.sub(r"(?<=\()seconds=(\d+)(?=\))", _minutes, text)


def _minutes(found: re.Match[str]) -> str:
    seconds = int(found[1])
    is_whole = seconds >= 60 and seconds % 60 == 0
    return f"minutes={seconds // 60}" if is_whole else found[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
