"""Turn a demonstration into a task: its actions are the oracle, and what it changed proposes the checkers.

Two members of a group start in one state. One is demonstrated in; the other stays as it was. So what differs between
them in the end is what the demonstration did, and not what the guest does by itself.
"""

import asyncio
import configparser
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from cuaenv.actions import Done, Fail
from cuaenv.client import AsyncEpisode, EnvError
from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.oracle import OracleAction, write_action
from envd.tasks.queries import parse_windows, window_query

HOME = "/home/user"
#: Files that programs write by themselves, as patterns of find.
_VOLATILE = (f"{HOME}/.cache", f"{HOME}/.local/share", f"{HOME}/.dbus", f"{HOME}/.*-errors", f"{HOME}/.*authority")
_MAX_TEXT_BYTES = 16 << 10
_MAX_LIST_BYTES = 4 << 20
_INI_SUFFIXES = {".ini", ".conf", ".cfg", ".desktop", ".rc"}
_LIST = """
export LC_ALL=C; home=$1; shift
find "$home" -xdev "$@" -type f -size -4096k -print0 2>/dev/null | xargs -0 -r sha256sum --
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A checker that the end of a demonstration satisfies and its start does not."""

    what: str
    """What was seen to change, for people."""
    checker: Mapping[str, Any]
    """The checker, in the notation of task files."""
    is_likely: bool = True
    """False for changes that are often a side effect, such as a window that was opened."""


async def _read_files(episode: AsyncEpisode) -> Mapping[str, str]:
    """Return SHA-256 by path, of the files in the user's home that programs do not write by themselves."""
    pruned = [word for path in _VOLATILE for word in ("-path", path, "-prune", "-o")]
    listed = await episode.run_command(["sh", "-c", _LIST, "list-files", HOME, *pruned])
    if len(listed.stdout) > _MAX_LIST_BYTES:
        raise GuestError(f"{HOME}: too many files for a demonstration")
    files = {}
    # Not splitlines: names may have the other line breaks of Unicode.
    for line in listed.stdout.decode(errors="replace").split("\n"):
        # Names with LF or backslashes begin with a backslash; no checker can name them.
        if match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line, re.DOTALL):
            files[match[2]] = match[1]
    return files


async def _read_windows(episode: AsyncEpisode) -> frozenset[tuple[str, str]]:
    """Return title and `instance.Class` of each open window."""
    query = window_query(GuestOs.LINUX)
    windows = (await episode.run_command(query.argv, as_root=query.as_root)).stdout.decode(errors="replace")
    return frozenset((each.title, each.wm_class) for each in parse_windows(windows))


async def propose(before: AsyncEpisode, after: AsyncEpisode) -> list[Proposal]:
    """Return proposals, the likely ones first; the last one says that nothing else may change."""
    start, end = await asyncio.gather(_read_files(before), _read_files(after))
    start_windows, end_windows = await asyncio.gather(_read_windows(before), _read_windows(after))
    found: list[Proposal] = []
    changed = sorted(path for path in start.keys() | end.keys() if start.get(path) != end.get(path))
    for path in changed:
        found += await _about_file(path, start, end, before, after)
    found += [
        Proposal(
            what=f"the window {title!r} was opened",
            checker={"kind": "window", "window": {"title": f"^{re.escape(title)}$"}},
            is_likely=False,
        )
        for title, _ in sorted(end_windows - start_windows)
    ]
    found.sort(key=lambda proposal: not proposal.is_likely)
    if changed:
        rest = {"kind": "unchanged", "paths": [HOME], "except": [*_VOLATILE, *changed], "new_files": "ignore"}
        found.append(Proposal(what="nothing else was changed", checker=rest))
    return found


async def _about_file(
    path: str, start: Mapping[str, str], end: Mapping[str, str], before: AsyncEpisode, after: AsyncEpisode
) -> list[Proposal]:
    if path not in end:
        return [Proposal(what=f"{path} was deleted", checker={"kind": "file_absent", "path": path})]
    what = f"{path} was {'changed' if path in start else 'created'}"
    text = await _text(after, path)
    if text is None:
        return [Proposal(what=what, checker={"kind": "file_bytes", "path": path, "sha256": end[path]})]
    if PurePosixPath(path).suffix in _INI_SUFFIXES and path in start:
        old = await _text(before, path)
        if old is not None and (entries := _changed_entries(old, text)):
            return [
                Proposal(
                    what=f"{path}: {section or 'top'}.{key} was set to {value!r}",
                    checker={"kind": "ini_value", "path": path, "section": section, "key": key, "equals": value},
                )
                for (section, key), value in entries.items()
            ]
    return [Proposal(what=what, checker={"kind": "file_text", "path": path, "equals": text})]


async def _text(episode: AsyncEpisode, path: str) -> str | None:
    """Return a file's text; None if it is large or no text."""
    try:
        data = await episode.read_file(path)
        text = data[: _MAX_TEXT_BYTES + 1].decode()
    except (EnvError, UnicodeDecodeError):
        return None
    return None if "\0" in text or len(data) > _MAX_TEXT_BYTES else text


def _changed_entries(before: str, after: str) -> dict[tuple[str, str], str]:
    """Return the entries of an INI file that are new or have another value, by section and key."""
    old, new = _entries(before), _entries(after)
    return {key: value for key, value in new.items() if old.get(key) != value}


def _entries(text: str) -> dict[tuple[str, str], str]:
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False, default_section="", allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_file(io.StringIO(text))
    except (configparser.Error, AttributeError):
        # Before Python 3.13, an indented line after a key without a value is an AttributeError.
        return {}
    return {(section, key): value or "" for section in parser.sections() for key, value in parser.items(section)}


def task_text(
    *,
    suite: str,
    name: str,
    instruction: str,
    setup: Sequence[Mapping[str, Any]],
    steps: Sequence[Sequence[OracleAction]],
    proposals: Sequence[Proposal],
    chosen: Sequence[int],
) -> str:
    """Return a task file. Proposals that were not chosen are comments in it.

    Args:
        setup: Verbs, in the notation of task files.
        chosen: The proposals that are the goal, by index.
    """
    checks = [proposals[index].checker for index in chosen]
    ends = bool(steps and isinstance(steps[-1][-1], Done | Fail))
    oracle: list[Any] = [[write_action(action) for action in step] for step in (*steps, *(() if ends else [(Done(),)]))]
    task = {
        "name": name,
        "level": 1 if len(steps) <= 1 else 2,
        "instruction": instruction,
        **({"setup": [dict(verb) for verb in setup]} if setup else {}),
        "checker": dict(checks[0]) if len(checks) == 1 else {"kind": "all", "checks": [dict(each) for each in checks]},
        "oracle": oracle,
    }
    text = yaml.safe_dump(
        {"version": 1, "suite": suite, "tasks": [task]}, sort_keys=False, allow_unicode=True, width=110
    )
    others = [proposal for index, proposal in enumerate(proposals) if index not in chosen]
    for proposal in others:
        # Names and values come from the guest. Readers of YAML end a comment at any line break of Unicode.
        what = "".join(char if char.isprintable() else repr(char)[1:-1] for char in proposal.what)
        dumped = json.dumps(proposal.checker)
        text += f"# also seen: {what}\n#   {dumped}\n"
    return text
