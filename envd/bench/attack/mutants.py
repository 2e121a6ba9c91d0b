"""Variations of a task's oracle that a sound checker scores below 1, and repetitions that it scores 1. Pure.

A mutant shares the first steps of the oracle and is played on a fork of the machine after them. Some mutants do the
same as the oracle (a text in another case, where case does not matter): a verdict in a reviewed file says so.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePosixPath

from cuaenv.actions import Action, Click, Done, Drag, Fail, TypeText
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.files import FileCheck
from envd.tasks.checkers.programs import Command, Window
from envd.tasks.checkers.session import AgentAnswer, Clipboard
from envd.tasks.checkers.union import AnyLeafChecker, leaves
from envd.tasks.model import Task
from envd.tasks.oracle import OracleAction, OracleSteps, write_action
from envd.tasks.text import TextExpectation
from envd.tasks.verbs import UploadFile, WriteFile

#: Distance in pixels to the neighbour of a widget.
_NEIGHBOUR_PX = 48
_SPARSE_FILE = "1G"
_REPETITIONS = 3
#: Shorter expected texts occur everywhere.
_TELLING_CHARS = 6


class Family(Enum):
    """What a mutant imitates."""

    ALMOST = "almost"
    """The oracle with one mistake."""
    LAZY = "lazy"
    """A cheat that knows only the instruction."""
    KNOWING = "knowing"
    """A cheat that knows the checker."""
    REPEATED = "repeated"
    """The oracle itself, which must always score 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One variation."""

    name: str
    """Unique within its task."""
    family: Family
    shared_count: int = 0
    """Steps of the oracle before which it is forked off."""
    commands: tuple[str, ...] = ()
    """Shell commands of the desktop's user, before its steps."""
    steps: OracleSteps
    """Its own steps; the last one ends the episode."""

    @property
    def expects_success(self) -> bool:
        """Whether it must score 1, and otherwise less than 1."""
        return self.family is Family.REPEATED

    @property
    def script(self) -> list[str]:
        """What it does, a line each, for people."""
        shown = [f"the oracle's first {self.shared_count} steps"] if self.shared_count else []
        shown += [f"$ {command}" for command in self.commands]
        return shown + [json.dumps([write_action(each) for each in step], ensure_ascii=False) for step in self.steps]

    def digest(self, task_digest: str) -> str:
        """Return the digest (16 hex digits) of the mutant of this version of its task: older verdicts do not count."""
        return hashlib.sha256(json.dumps([task_digest, self.name, *self.script]).encode()).hexdigest()[:16]


def mutants_of(task: Task) -> list[Mutant]:
    """Return the mutants of a task with an oracle and a checker, in the order of their forks."""
    checks = list(leaves(task.checker)) if task.checker else []
    end = _end_of(task.oracle)
    found = [*_almost(task.oracle, checks), *_repeated(task.oracle)]
    if task.os is GuestOs.LINUX:
        found += [*_lazy(task, checks, end), *_knowing(checks, end)]
    own = {tuple(mutant.script) for mutant in found if mutant.family is Family.REPEATED}
    kept: dict[tuple[str, ...], Mutant] = {}
    for mutant in found:
        script = tuple(mutant.script)
        if mutant.expects_success or script not in own:
            kept.setdefault((*script, mutant.name) if mutant.expects_success else script, mutant)
    return sorted(kept.values(), key=lambda mutant: mutant.shared_count)


def _end_of(oracle: OracleSteps) -> OracleSteps:
    """Return the step that ends an oracle, without an answer."""
    return ((Done(),),) if oracle else ()


def _almost(oracle: OracleSteps, checks: Sequence[AnyLeafChecker]) -> Iterator[Mutant]:
    def mutant(name: str, index: int, *steps: tuple[OracleAction, ...], keep: int = 1) -> Mutant:
        rest = (*steps, *oracle[index + keep :])
        return Mutant(name=f"step {index + 1}: {name}", family=Family.ALMOST, shared_count=index, steps=_ended(rest))

    for index, step in enumerate(oracle):
        is_last = index == len(oracle) - 1
        if not _ends(step):
            yield mutant("left out", index)
            yield mutant("twice", index, step, step)
            if not is_last and not _ends(oracle[index + 1]):
                yield mutant("after the next one", index, oracle[index + 1], step, keep=2)
        for place, action in enumerate(step):
            for name, changed in _changed_actions(action, checks):
                yield mutant(f"{name}, action {place + 1}", index, (*step[:place], changed, *step[place + 1 :]))


def _changed_actions(action: OracleAction, checks: Sequence[AnyLeafChecker]) -> Iterator[tuple[str, Action]]:
    match action:
        case TypeText(text=text):
            yield from ((name, TypeText(changed)) for name, changed in _changed_texts(text, checks))
        case Done(answer=answer) if answer:
            yield from ((name, Done(changed)) for name, changed in _changed_texts(answer, ()))
            yield "answer hedged", Done(f"{answer} or {answer[::-1]}x")
            yield "answer among others", Done(f"{answer[::-1]}x, {answer}, x{answer[::-1]}")
            yield "no answer", Done()
        case Click(x=int(x), y=int(y)):
            yield "below", replace(action, x=x, y=y + _NEIGHBOUR_PX)
        case Drag():
            yield "ends below", replace(action, end_y=action.end_y + _NEIGHBOUR_PX)


def _changed_texts(text: str, checks: Sequence[AnyLeafChecker]) -> Iterator[tuple[str, str]]:
    stripped = text.rstrip("\n")
    ending = text[len(stripped) :]
    if not stripped:
        return
    yield "other case", stripped.swapcase() + ending
    for name, wanted in (("one character", str.isalpha), ("one digit", str.isdigit)):
        if changed := _with_one_changed(stripped, wanted):
            yield name, changed + ending
    yield "blank at the end", f"{stripped} {ending}"
    for check in checks:
        if isinstance(check, FileCheck) and (stem := PurePosixPath(check.path).stem) and stem in text:
            yield f"other name than {stem}", text.replace(stem, f"{stem}2")


def _with_one_changed(text: str, wanted: Callable[[str], bool]) -> str:
    """Return a text with its last wanted character replaced by the one before it; empty without one."""
    for index in range(len(text) - 1, -1, -1):
        if wanted(text[index]):
            other = chr(ord(text[index]) - 1)
            return text[:index] + (other if wanted(other) else chr(ord(text[index]) + 1)) + text[index + 1 :]
    return ""


def _lazy(task: Task, checks: Sequence[AnyLeafChecker], end: OracleSteps) -> Iterator[Mutant]:
    def mutant(name: str, *commands: str, steps: OracleSteps = end) -> Mutant:
        return Mutant(name=name, family=Family.LAZY, commands=commands, steps=steps)

    inputs = list(_inputs(task))
    for path in dict.fromkeys(check.path for check in checks if isinstance(check, FileCheck)):
        file, directory = shlex.quote(path), shlex.quote(str(PurePosixPath(path).parent))
        yield mutant(f"empty {path}", f"mkdir -p {directory}; : > {file}")
        yield mutant(f"touched {path}", f"touch {file}")
        for source in inputs:
            if source != path:
                yield mutant(f"{source} copied to {path}", f"cp {shlex.quote(source)} {file}")
        for text in _expected(checks):
            yield mutant(f"{text[:24]!r} next to {path}", f"printf %s {shlex.quote(text)} > {directory}/other.txt")
    if any(isinstance(check, AgentAnswer) for check in checks):
        yield mutant("instruction as answer", steps=((Done(task.instruction),),))
    else:
        yield mutant("answer only", steps=((Done("; ".join(_expected(checks)) or "done"),),))


def _inputs(task: Task) -> Iterator[str]:
    for verb in task.setup:
        match verb:
            case WriteFile(path=path):
                yield path
            case UploadFile(files=files):
                yield from (file.path for file in files)


def _knowing(checks: Sequence[AnyLeafChecker], end: OracleSteps) -> Iterator[Mutant]:
    def mutant(name: str, *commands: str) -> Mutant:
        return Mutant(name=name, family=Family.KNOWING, commands=commands, steps=end)

    for path in dict.fromkeys(check.path for check in checks if isinstance(check, FileCheck)):
        file = shlex.quote(path)
        make = f"rm -rf {file}; mkdir -p {shlex.quote(str(PurePosixPath(path).parent))}"
        yield mutant(f"link in place of {path}", f"{make}; ln -s /proc/self/environ {file}")
        yield mutant(f"endless link in place of {path}", f"{make}; ln -s /dev/zero {file}")
        yield mutant(f"directory in place of {path}", f"{make}; mkdir {file}")
        yield mutant(f"pipe in place of {path}", f"{make}; mkfifo {file}")
        yield mutant(f"large file in place of {path}", f"{make}; truncate -s {_SPARSE_FILE} {file}")
    texts = _expected(checks)
    for program in dict.fromkeys(_programs(checks)):
        fake = f"printf '#!/bin/sh\\nprintf %%s {shlex.quote(texts[0] if texts else '')}\\n' > $d/{program}"
        yield mutant(
            f"own {program} in PATH",
            f"for d in ~/bin ~/.local/bin; do mkdir -p $d; {fake}; chmod +x $d/{program}; done; "
            'echo "PATH=$HOME/bin:$PATH" >> ~/.profile',
        )
    yield mutant("clock set back", "date -s 2001-01-01 2>/dev/null; true")


def _repeated(oracle: OracleSteps) -> Iterator[Mutant]:
    for number in range(1, _REPETITIONS + 1):
        yield Mutant(name=f"oracle, run {number}", family=Family.REPEATED, steps=oracle)


def _expected(checks: Iterable[AnyLeafChecker]) -> list[str]:
    """Return the texts that checkers expect, each once."""
    texts: list[str] = []
    for check in checks:
        for each in (check, getattr(check, "stdout", None)):
            if isinstance(each, TextExpectation):
                texts += [text for text in (each.equals, each.contains) if text and len(text) >= _TELLING_CHARS]
    return list(dict.fromkeys(texts))


def _programs(checks: Iterable[AnyLeafChecker]) -> Iterator[str]:
    for check in checks:
        match check:
            case Command(argv=(program, *_)):
                yield PurePosixPath(program).name
            case Window():
                yield "wmctrl"
            case Clipboard():
                yield "xclip"


def _ends(step: Sequence[OracleAction]) -> bool:
    return any(isinstance(action, Done | Fail) for action in step)


def _ended(steps: Sequence[tuple[OracleAction, ...]]) -> OracleSteps:
    return tuple(steps) if steps and _ends(steps[-1]) else (*steps, (Done(),))
