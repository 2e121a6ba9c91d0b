"""Score a task on the state that its guest is in.

Each checker first looks (I/O: `_look`) and then judges what it found in a pure function (`judge_...`), so every rule
can be read, and tested, without a guest. Files are judged as bytes, decoded by the checker's declared policy. What
the agent left undone scores less than 1 and says why in the evidence; a checker that cannot look raises, and its
episode has no score. Nothing that an agent can leave behind (a directory or a pipe where a file should be, a file
of any size) stops a checker from looking.
"""

import asyncio
import base64
import codecs
import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from envd.errors import EvaluatorFailed, GuestError, GuestUnresponsive
from envd.guest.actions import Done, Fail
from envd.guest.desktop import CommandResult, Desktop
from envd.tasks.evaluation import CheckResult, Evaluation
from envd.tasks.model import (
    BOM,
    AllOf,
    Answer,
    AnyChecker,
    AnyOf,
    Command,
    Directory,
    FileAbsent,
    FileBytes,
    FileText,
    LeafChecker,
    Process,
    Task,
    TextExpectation,
    Weighted,
    Window,
)
from envd.tasks.windows import OpenWindow, describe_windows, find_window, list_windows

_EVIDENCE_CHARS = 2000
_QUOTE_CHARS = 300

#: Limit of the commands that look at the guest for us; each ends at once in a healthy guest.
_LOOK_TIMEOUT_S = 30.0

#: No task is about a file this large, and reading it would only hold up the daemon.
_MAX_FILE_BYTES = 16 << 20

#: The longest mark first, for that of UTF-16 LE begins that of UTF-32 LE.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

_PROBE = """
if [ -f "$1" ]; then exec stat -L -c %s -- "$1"
elif [ -e "$1" ] || [ -L "$1" ]; then echo other
else echo absent
fi
"""
_NO_DIRECTORY = 66
_LIST = f'[ -d "$1" ] || exit {_NO_DIRECTORY}; exec find "$1/" -mindepth 1 -maxdepth 1 -printf "%y%f\\0"'


class Verdict(NamedTuple):
    """What a judge says."""

    score: float
    evidence: str


class FoundFile(NamedTuple):
    """What is at a path."""

    kind: str
    """`absent`, `file`, `large` (a file beyond our limit) or `other` (a directory, a pipe, a dangling link)."""
    data: bytes = b""
    """The content of a `file`."""
    size_bytes: int = 0


class _Score(NamedTuple):
    score: float
    checks: tuple[CheckResult, ...]


class _LookError(Exception):
    """A checker could not look at the guest."""


async def evaluate(task: Task, desktop: Desktop, *, last_action: Done | Fail | None, timeout_s: float) -> Evaluation:
    """Score a task. Only looks: the guest stays as it is, unless a `command` checker's own command changes it.

    Args:
        task: What was to be done.
        desktop: Where.
        last_action: How the agent ended the episode; None when it did not.
        timeout_s: Limit for all checkers together, in seconds.

    Raises:
        EvaluatorFailed: A checker could not look, or not in time. There is no score.
        MachineLost: The machine is gone. There is no score.
    """
    if task.checker is None:
        return judge_infeasible(last_action)
    if isinstance(last_action, Fail):
        return _single("feasible", Verdict(0.0, "the agent declared the task infeasible, which it is not"))
    try:
        async with asyncio.timeout(timeout_s):
            score, checks = await _evaluate(task.checker, desktop, last_action)
    except TimeoutError as error:
        raise EvaluatorFailed(f"task {task.task_id}: evaluation exceeded its limit of {timeout_s:g} s") from error
    except _LookError as error:
        raise EvaluatorFailed(f"task {task.task_id}: {error}") from error
    return Evaluation(score=score, checks=checks)


async def _evaluate(checker: AnyChecker, desktop: Desktop, last_action: Done | None) -> _Score:
    """Score a checker with all its parts: none is skipped, for each is evidence."""
    match checker:
        case AllOf() | AnyOf():
            parts = [await _evaluate(check, desktop, last_action) for check in checker.checks]
            combine = min if isinstance(checker, AllOf) else max
            score = combine(part.score for part in parts)
        case Weighted():
            parts = [await _evaluate(part.check, desktop, last_action) for part in checker.checks]
            score = weighted_mean([part.score for part in parts], weights=[part.weight for part in checker.checks])
        case _:
            name = checker.name or describe(checker)
            try:
                verdict = await _look(checker, desktop, last_action)
            except (GuestError, GuestUnresponsive) as error:
                raise _LookError(f"check {name!r} could not look: {error}") from error
            return _Score(verdict.score, (_result(name, verdict),))
    return _Score(score, tuple(check for part in parts for check in part.checks))


def weighted_mean(scores: Sequence[float], *, weights: Sequence[float]) -> float:
    """Return the mean of scores by weight: exactly 1.0 when all are."""
    return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)


def describe(checker: LeafChecker) -> str:
    """Return a check's default name: its kind and subject."""
    match checker:
        case FileText() | FileBytes() | FileAbsent() | Directory():
            subject = checker.path
        case Command():
            subject = " ".join(checker.argv)
        case Window():
            subject = checker.window.title or checker.window.wm_class
        case Process():
            subject = checker.program
        case Answer():
            return checker.kind
    return f"{checker.kind} {subject}"


def _result(name: str, verdict: Verdict) -> CheckResult:
    return CheckResult(name=name, score=verdict.score, evidence=verdict.evidence[:_EVIDENCE_CHARS])


def _single(name: str, verdict: Verdict) -> Evaluation:
    return Evaluation(score=verdict.score, checks=(_result(name, verdict),))


# -- looking ----------------------------------------------------------------------------------------------------


async def _look(checker: LeafChecker, desktop: Desktop, last_action: Done | None) -> Verdict:
    """Look at the guest and judge. Raises: GuestError, GuestUnresponsive, MachineLost."""
    match checker:
        case FileText():
            return judge_file_text(await _find_file(desktop, checker.path), checker)
        case FileBytes():
            return judge_file_bytes(await _find_file(desktop, checker.path), checker)
        case FileAbsent():
            return judge_absent(await _probe(desktop, checker.path))
        case Directory():
            return judge_directory(await _list_directory(desktop, checker.path), checker)
        case Command():
            result = await desktop.run(checker.argv, timeout_s=checker.timeout_s, as_root=checker.as_root)
            if result.exit_code in (126, 127) and checker.exit_code != result.exit_code:
                raise GuestError(f"the shell could not run {checker.argv[0]}: {_quote(result.stderr)}")
            return judge_command(result, checker)
        case Window():
            return judge_windows(await list_windows(desktop, timeout_s=_LOOK_TIMEOUT_S), checker)
        case Process():
            output = await _inspect(desktop, ("ps", "-e", "-o", "stat=,comm="))
            return judge_processes(output.stdout.decode(errors="replace"), checker)
        case Answer():
            return judge_answer(last_action, checker)


async def _probe(desktop: Desktop, path: str) -> FoundFile:
    """Return what is at a path, without its content."""
    # As root, so that no permission which the agent takes away hides anything; and before reading, for to read from
    # a pipe would wait for ever.
    output = (await _inspect(desktop, ("sh", "-c", _PROBE, "sh", path))).stdout.decode().strip()
    if output in ("absent", "other"):
        return FoundFile(output)
    size_bytes = int(output)
    return FoundFile("file" if size_bytes <= _MAX_FILE_BYTES else "large", size_bytes=size_bytes)


async def _find_file(desktop: Desktop, path: str) -> FoundFile:
    found = await _probe(desktop, path)
    if found.kind != "file":
        return found
    data = await desktop.read_file(path, max_bytes=_MAX_FILE_BYTES)
    return FoundFile("absent") if data is None else found._replace(data=data, size_bytes=len(data))


async def _list_directory(desktop: Desktop, path: str) -> frozenset[str] | None:
    """Return a directory's entries, subdirectories with `/` behind, or None if there is no such directory."""
    result = await _inspect(desktop, ("sh", "-c", _LIST, "sh", path), allow=(_NO_DIRECTORY,))
    if result.exit_code == _NO_DIRECTORY:
        return None
    rows = result.stdout.decode(errors="replace").split("\0")[:-1]
    return frozenset(f"{row[1:]}/" if row[0] == "d" else row[1:] for row in rows)


async def _inspect(desktop: Desktop, argv: tuple[str, ...], *, allow: tuple[int, ...] = ()) -> CommandResult:
    """Run a command of ours as root; any failure of it is ours, never the agent's."""
    result = await desktop.run(argv, timeout_s=_LOOK_TIMEOUT_S, as_root=True)
    if result.exit_code not in (0, *allow):
        raise GuestError(f"{argv[0]} ended with {result.exit_code}: {_quote(result.stderr)}")
    return result


# -- judging ----------------------------------------------------------------------------------------------------


def judge_infeasible(last_action: Done | Fail | None) -> Evaluation:
    """Judge a task that no one can do: 1 for saying so, 0 for anything else."""
    if isinstance(last_action, Fail):
        return _single("infeasible", Verdict(1.0, "the agent declared the task infeasible, as it is"))
    ending = "said done" if isinstance(last_action, Done) else "did not end the episode"
    return _single("infeasible", Verdict(0.0, f"the agent {ending}; right was to declare the task infeasible"))


def judge_file_text(found: FoundFile, checker: FileText) -> Verdict:
    """Judge a file's text."""
    if found.kind != "file":
        return _not_a_file(found, checker.path)
    decoded = decode(found.data, checker.encodings)
    if decoded is None:
        tried = ", ".join(checker.encodings)
        return Verdict(0.0, f"{found.size_bytes} bytes are no text in {tried}: {_quote(found.data)}")
    return judge_text(decoded, checker)


def judge_file_bytes(found: FoundFile, checker: FileBytes) -> Verdict:
    """Judge a file's bytes."""
    if found.kind != "file":
        return _not_a_file(found, checker.path)
    digest = hashlib.sha256(found.data).hexdigest()
    expected = checker.sha256 or hashlib.sha256(base64.b64decode(checker.base64 or "")).hexdigest()
    evidence = f"{found.size_bytes} bytes with sha256 {digest}"
    return Verdict(1.0, evidence) if digest == expected else Verdict(0.0, f"{evidence}, expected {expected}")


def judge_absent(found: FoundFile) -> Verdict:
    """Judge that nothing is at a path."""
    if found.kind == "absent":
        return Verdict(1.0, "nothing is there")
    return Verdict(0.0, "something other than a file is there" if found.kind == "other" else "a file is there")


def judge_directory(entries: frozenset[str] | None, checker: Directory) -> Verdict:
    """Judge a directory's entries."""
    if entries is None:
        return Verdict(0.0, f"there is no directory {checker.path}")
    wanted = frozenset(checker.entries)
    missing, extra = sorted(wanted - entries), sorted(entries - wanted)
    if missing or (extra and checker.mode == "exactly"):
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"not wanted: {', '.join(extra)}"] if extra and checker.mode == "exactly" else []
        return Verdict(0.0, f"{'; '.join(parts)}; found: {', '.join(sorted(entries)) or 'nothing'}")
    return Verdict(1.0, f"found: {', '.join(sorted(entries)) or 'nothing'}")


def judge_command(result: CommandResult, checker: Command) -> Verdict:
    """Judge what a command did."""
    if checker.exit_code is not None and result.exit_code != checker.exit_code:
        output = _quote(result.stderr or result.stdout)
        return Verdict(0.0, f"exit code {result.exit_code}, expected {checker.exit_code}; output {output}")
    if checker.stdout is None:
        return Verdict(1.0, f"exit code {result.exit_code}")
    return judge_text(result.stdout.decode(errors="replace"), checker.stdout)


def judge_windows(windows: tuple[OpenWindow, ...], checker: Window) -> Verdict:
    """Judge which windows are open."""
    is_right = (find_window(windows, checker.window) is not None) == checker.present
    return Verdict(float(is_right), f"open: {describe_windows(windows)}")


def judge_processes(listing: str, checker: Process) -> Verdict:
    """Judge which programs run, from the output of `ps -e -o stat=,comm=`."""
    rows = [line.split(maxsplit=1) for line in listing.splitlines()]
    # A zombie has ended; only its parent has not yet taken note.
    count = sum(len(row) == 2 and row[1] == checker.program and not row[0].startswith("Z") for row in rows)
    return Verdict(float((count > 0) == checker.running), f"{count} processes named {checker.program} run")


def judge_answer(last_action: Done | None, checker: Answer) -> Verdict:
    """Judge the agent's answer."""
    if last_action is None or not last_action.answer.strip():
        return Verdict(0.0, "the agent gave no answer")
    return judge_text(last_action.answer.strip(), checker)


def judge_text(text: str, expected: TextExpectation) -> Verdict:
    """Judge a text by an expectation's own rules for newlines and case."""
    text = _unify(text, expected)
    if expected.contains is not None:
        needle = _unify(expected.contains, expected)
        found = _fold(needle, expected) in _fold(text, expected)
        return Verdict(float(found), f"{_quote(needle)} is {'in' if found else 'not in'} {_quote(text)}")
    text = _trim(text, expected)
    if expected.matches is not None:
        flags = re.DOTALL | (re.IGNORECASE if expected.case == "ignore" else 0)
        is_match = re.fullmatch(expected.matches, text, flags) is not None
        verb = "matches" if is_match else "does not match"
        return Verdict(float(is_match), f"{_quote(text)} {verb} /{expected.matches}/")
    wanted = _trim(_unify(expected.equals or "", expected), expected)
    if _fold(text, expected) == _fold(wanted, expected):
        return Verdict(1.0, f"is {_quote(text)}")
    return Verdict(0.0, f"differs {_first_difference(text, wanted)}")


def decode(data: bytes, encodings: Sequence[str]) -> str | None:
    """Return the text of bytes in the first encoding that fits, or None.

    `bom` fits where a byte order mark stands at the start, which it drops. Text with NUL does not fit: UTF-16 without
    a mark would otherwise pass as UTF-8 full of NULs.
    """
    for encoding in encodings:
        try:
            text = _decode_by_mark(data) if encoding == BOM else data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if text is not None and "\0" not in text:
            return text
    return None


def _decode_by_mark(data: bytes) -> str | None:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return None


def _unify(text: str, rules: TextExpectation) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if rules.newlines == "lf" else text


def _trim(text: str, rules: TextExpectation) -> str:
    if rules.trailing_newline == "strict":
        return text
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _fold(text: str, rules: TextExpectation) -> str:
    return text.casefold() if rules.case == "ignore" else text


def _not_a_file(found: FoundFile, path: str) -> Verdict:
    match found.kind:
        case "absent":
            return Verdict(0.0, f"there is no file {path}")
        case "large":
            return Verdict(0.0, f"{path} has {found.size_bytes} bytes, more than {_MAX_FILE_BYTES}")
        case _:
            return Verdict(0.0, f"{path} is not a file")


def _first_difference(text: str, wanted: str) -> str:
    index = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted)))
    line = wanted.count("\n", 0, index) + 1
    start = max(0, index - 20)
    found, expected = (_quote(value[start : start + 100]) for value in (text, wanted))
    return f"at character {index} (line {line}): found {found}, expected {expected}; the whole is {_quote(text)}"


def _quote(value: str | bytes) -> str:
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
    return repr(text if len(text) <= _QUOTE_CHARS else f"{text[:_QUOTE_CHARS]}…")
