"""Variations of a task's oracle that a sound checker scores below 1, and repetitions that it scores 1. Pure.

A mutant shares the first steps of the oracle and is played on a fork of the machine after them. Some mutants do the
same as the oracle (a text in another case, where case does not matter): a verdict in a reviewed file says so.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from itertools import chain, product, zip_longest
from pathlib import PurePosixPath
from string import Formatter

import yaml

from cuaenv import actions
from cuaenv.actions import Action, Click, Done, Drag, Fail, TypeText
from envd.hypervisor.machine import GuestOs
from envd.integrations.cua_gym.bundle import WORKSPACE, CuaGymCheck
from envd.integrations.open_computer.verifiers import OpenComputerCheck
from envd.integrations.osworld.downloads import getter_configs
from envd.integrations.osworld.tasks import OsworldEvaluator
from envd.tasks.basis import judged_digest
from envd.tasks.checker_union import AnyLeafChecker, leaves
from envd.tasks.checkers.data import IniEntry, JsonValueAt
from envd.tasks.checkers.files import FileCheck
from envd.tasks.checkers.programs import Command, WindowPresent
from envd.tasks.checkers.session import AgentAnswer, Clipboard
from envd.tasks.checkers.unchanged import Unchanged
from envd.tasks.model import Task
from envd.tasks.oracle import Aimed, OracleAction, OracleSteps, write_action
from envd.tasks.text import TextExpectation
from envd.tasks.verbs import UploadFile, WriteSetupFile

#: Distance in pixels to the neighbour of a widget.
_NEIGHBOUR_PX = 48
_REPETITIONS = 2
#: An oracle with fewer steps has no step that only opens something.
_OPENING_STEPS = 2
#: Shorter expected texts occur everywhere.
_TELLING_CHARS = 6
#: Files there belong to no one.
_SCRATCH = "/tmp/"  # noqa: S108 - in the guest
#: A command that starts with something else is more than a call of a program.
_PROGRAM = re.compile(r"[\w./-]+")
_HEDGED = ("answer hedged", "answer among others")
#: Values of one kind that cheats use.
_MAX_VALUES = 2


class Family(Enum):
    """What a mutant imitates."""

    ALMOST = "almost"
    """The oracle with one mistake."""
    LAZY = "lazy"
    """A cheat that knows only the instruction."""
    KNOWING = "knowing"
    """A cheat that knows the checker."""
    DAMAGE = "damage"
    """The oracle, and then damage to something else."""
    HEDGED = "hedged"
    """Several answers or results, of which one is right."""
    EARLY = "early"
    """Right at some time, and wrong at the end, or not finished."""
    REPEATED = "repeated"
    """The oracle itself, which must always score 1, whatever else is on the screen."""


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
    """Return the mutants of a task with a checker, in the order of their forks; without an oracle, cheats only."""
    checks = list(leaves(task.checker)) if task.checker else []
    found = [*_almost(task.oracle, checks), *_repeated(task.oracle), *_answers(task, checks)]
    if task.os is GuestOs.LINUX:
        found += _cheating(task, checks)
    if not task.oracle:
        found = [mutant for mutant in found if mutant.family in {Family.LAZY, Family.KNOWING}]
    own = {tuple(mutant.script) for mutant in found if mutant.family is Family.REPEATED}
    kept: dict[tuple[str, ...], Mutant] = {}
    for mutant in found:
        script = tuple(mutant.script)
        if mutant.expects_success or script not in own:
            kept.setdefault((*script, mutant.name) if mutant.expects_success else script, mutant)
    return sorted(kept.values(), key=lambda mutant: mutant.shared_count)


def attack_digest(task: Task, *, runs_guests: bool) -> str:
    """Return the digest of all mutants that are played of this version of a task and its checkers."""
    own = judged_digest(task)
    digests = (mutant.digest(own) for mutant in playable(task, runs_guests=runs_guests))
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16]


def playable(task: Task, *, runs_guests: bool) -> list[Mutant]:
    """Return the mutants that can be played: drawn desktops have no shell that could run commands."""
    return [mutant for mutant in mutants_of(task) if runs_guests or not mutant.commands]


def _almost(oracle: OracleSteps, checks: Sequence[AnyLeafChecker]) -> Iterator[Mutant]:
    def mutant(name: str, index: int, *steps: tuple[OracleAction, ...], keep: int = 1) -> Mutant:
        rest = (*steps, *oracle[index + keep :])
        return Mutant(name=f"step {index + 1}: {name}", family=Family.ALMOST, shared_count=index, steps=_ended(rest))

    # How an agent finds an answer is free.
    answer_is_all = any(isinstance(check, AgentAnswer) for check in checks) and all(
        isinstance(check, AgentAnswer | Unchanged) for check in checks
    )
    for index, step in enumerate(oracle):
        if answer_is_all and not _ends(step):
            continue
        is_last = index == len(oracle) - 1
        if not _ends(step):
            yield mutant("left out", index)
            yield mutant("twice", index, step, step)
            if index == 0 and len(oracle) > _OPENING_STEPS:
                yield mutant("and nothing else", index, step, keep=len(oracle))
            if not is_last and not _ends(oracle[index + 1]):
                yield mutant("after the next one", index, oracle[index + 1], step, keep=2)
        for place, action in enumerate(step):
            for name, changed in _changed_actions(action, checks):
                found = mutant(f"{name}, action {place + 1}", index, (*step[:place], changed, *step[place + 1 :]))
                yield replace(found, family=Family.HEDGED) if name in _HEDGED else found


def _changed_actions(action: OracleAction, checks: Sequence[AnyLeafChecker]) -> Iterator[tuple[str, Action]]:
    match action:
        case Aimed(action=plain):
            yield from _changed_actions(plain, checks)
        case TypeText(text=text):
            yield from ((name, TypeText(changed)) for name, changed in _changed_texts(text, checks))
        case actions.RunShell(command=text) if judged := [
            each for each in checks if isinstance(each, OpenComputerCheck)
        ]:
            for value in dict.fromkeys(chain.from_iterable(check.values() for check in judged)):
                if value in text:
                    for name, changed in changed_values(value):
                        yield f"{value}: {name}", replace(action, command=text.replace(value, changed))
        case actions.RunShell(command=text):
            yield from ((name, replace(action, command=changed)) for name, changed in _changed_texts(text, ()))
        case actions.WriteFile(content=text):
            yield from ((name, replace(action, content=changed)) for name, changed in _changed_texts(text, ()))
        case actions.EditFile(new=text):
            yield from ((name, replace(action, new=changed)) for name, changed in _changed_texts(text, ()))
        case Done(answer=answer) if answer:
            yield from ((name, Done(changed)) for name, changed in _changed_texts(answer, ()))
            yield _HEDGED[0], Done(f"{answer} or {answer[::-1]}x")
            yield _HEDGED[1], Done(f"{answer[::-1]}x, {answer}, x{answer[::-1]}")
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
    if stripped.swapcase() != stripped:
        yield "other case", stripped.swapcase() + ending
    for name, wanted in (("one character", str.isalpha), ("one digit", str.isdigit)):
        if changed := _with_one_changed(stripped, wanted):
            yield name, changed + ending
    yield "blank at the end", f"{stripped} {ending}"
    for check in checks:
        if isinstance(check, FileCheck) and (stem := PurePosixPath(check.path).stem) and stem in text:
            yield f"other name than {stem}", text.replace(stem, f"{stem}2")
            if (directory := str(PurePosixPath(check.path).parent)) in text:
                yield f"elsewhere than {directory}", text.replace(directory, "/tmp")  # noqa: S108 - in the guest


def changed_values(value: str) -> Iterator[tuple[str, str]]:
    """Yield almost equal values, each with a name for the change."""
    for name, wanted in (("one character", str.isalpha), ("one digit", str.isdigit)):
        if changed := _with_one_changed(value, wanted):
            yield name, changed
    if value.swapcase() != value:
        yield "other case", value.swapcase()


def _with_one_changed(text: str, wanted: Callable[[str], bool]) -> str:
    """Return a text with its last wanted character replaced by the one before it; empty without one."""
    for index in range(len(text) - 1, -1, -1):
        if wanted(text[index]):
            other = chr(ord(text[index]) - 1)
            return text[:index] + (other if wanted(other) else chr(ord(text[index]) + 1)) + text[index + 1 :]
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cheat:
    """An entry of `cheats.yaml`."""

    name: str
    run: str
    after: str = ""

    @property
    def values(self) -> set[str]:
        """The names of the values that it needs."""
        return {name for text in (self.name, self.run) for _, name, *_ in Formatter().parse(text) if name}


@cache
def _cheats() -> dict[Family, list[_Cheat]]:
    entries = yaml.safe_load((files("envd.authoring.attack") / "cheats.yaml").read_text(encoding="utf-8"))
    return {Family(name): [_Cheat(**entry) for entry in own] for name, own in entries.items()}


def _cheating(task: Task, checks: Sequence[AnyLeafChecker]) -> Iterator[Mutant]:
    """Yield the cheats of the table, each for every combination of the values that it needs."""
    solved = len(task.oracle) - ends(task.oracle)
    values = _values(task, checks)
    for family, cheats in _cheats().items():
        for cheat in cheats:
            named = [rows for rows in values if cheat.values & set(rows[0])]
            if not cheat.values <= {name for rows in named for name in rows[0]}:
                continue
            for combination in product(*named):
                row = {name: value for part in combination for name, value in part.items()}
                quoted = {name: shlex.quote(value) for name, value in row.items()}
                if row.get("source", "") != row.get("file"):
                    yield Mutant(
                        name=cheat.name.format_map({name: value[:60] for name, value in row.items()}),
                        family=family,
                        shared_count=solved if cheat.after else 0,
                        commands=(cheat.run.format_map(quoted),),
                        steps=task.oracle[solved:] if cheat.after and task.oracle[solved:] else ((Done(),),),
                    )


def _values(task: Task, checks: Sequence[AnyLeafChecker]) -> list[list[dict[str, str]]]:
    """Return the values of cheats, by name: a list for each set of names that vary together."""
    results = dict.fromkeys(chain.from_iterable(map(_paths, checks)))
    inputs = list(dict.fromkeys(_inputs(task)))
    lists = [
        [{"file": path, "directory": str(PurePosixPath(path).parent)} for path in results],
        [{"source": path} for path in inputs],
        [
            {"text": text, "encoded": _base64(text), "key": _base64(max(text.split("\n"), key=len))}
            for text in _expected(checks)
        ],
        [_program(name, output) for name, output in dict(_programs(checks)).items()],
        [{"settings": path, "content": content} for path, content in _settings(checks)],
        [{"bystander": path} for path in inputs if path not in results and not path.startswith(_SCRATCH)],
        [{"workspace": WORKSPACE} for check in checks if isinstance(check, CuaGymCheck)],
    ]
    return [rows[:_MAX_VALUES] for rows in lists if rows]


def _paths(check: AnyLeafChecker) -> Iterator[str]:
    """Yield the files that a checker reads."""
    match check:
        case FileCheck(path=path):
            yield path
        case OsworldEvaluator():
            named = (getter.get("path") for getter in getter_configs(check.to_osworld(), "result"))
            yield from (name for name in named if isinstance(name, str) and name.startswith("/"))
        case OpenComputerCheck():
            yield from check.paths()


def _program(name: str, output: str) -> dict[str, str]:
    row = {"program": name, "output": _base64(output)}
    return {**row, "python": name} if name.startswith("python") else row


def _settings(checks: Iterable[AnyLeafChecker]) -> Iterator[tuple[str, str]]:
    """Yield the paths of settings files, and a content of each that has the expected value and nothing else."""
    for check in checks:
        match check:
            case IniEntry(path=path, equals=value) if value is not None:
                yield path, f"[{check.section}]\n{check.key}={value}\n"
            case JsonValueAt(path=path, equals=value) if value is not None:
                for part in reversed(check.at):
                    value = {str(part): value}
                yield path, json.dumps(value)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _answers(task: Task, checks: Sequence[AnyLeafChecker]) -> Iterator[Mutant]:
    if any(isinstance(check, AgentAnswer) for check in checks):
        yield Mutant(name="instruction as answer", family=Family.LAZY, steps=((Done(task.instruction),),))
    else:
        answer = "; ".join(_expected(checks)) or "done"
        yield Mutant(name="answer only", family=Family.LAZY, steps=((Done(answer),),))


def _inputs(task: Task) -> Iterator[str]:
    for verb in task.setup:
        match verb:
            case WriteSetupFile(path=path):
                yield path
            case UploadFile(files=files):
                yield from (file.path for file in files)


def _repeated(oracle: OracleSteps) -> Iterator[Mutant]:
    for number in range(1, _REPETITIONS + 1):
        yield Mutant(name=f"oracle, run {number}", family=Family.REPEATED, steps=oracle)


def _expected(checks: Iterable[AnyLeafChecker]) -> list[str]:
    texts: list[str] = []
    for check in checks:
        for each in (check, getattr(check, "stdout", None)):
            if isinstance(each, TextExpectation):
                texts += [text for text in (each.equals, each.contains) if text and len(text) >= _TELLING_CHARS]
    return list(dict.fromkeys(texts))


def _programs(checks: Iterable[AnyLeafChecker]) -> Iterator[tuple[str, str]]:
    """Yield the programs that checkers run, and what each must print."""
    for check in checks:
        match check:
            case Command(argv=(program, *_), stdout=stdout):
                yield PurePosixPath(program).name, (stdout.equals or stdout.contains or "") if stdout else ""
            case OsworldEvaluator():
                evaluator = check.to_osworld()
                for getter, wanted in zip_longest(*(getter_configs(evaluator, key) for key in ("result", "expected"))):
                    if getter and (command := getter.get("command")):
                        program = (command.splitlines()[-1].split() if isinstance(command, str) else command)[0]
                        output = ((wanted or {}).get("rules") or {}).get("expected", "")
                        if _PROGRAM.fullmatch(program):
                            yield PurePosixPath(program).name, str(output)
            case WindowPresent(window=window):
                yield "wmctrl", f"0x00000001  0 {window.wm_class or 'x.X'}  guest {window.title}\n"
            case Clipboard(equals=equals, contains=contains):
                yield "xclip", equals or contains or ""


def ends(steps: OracleSteps) -> bool:
    """Return whether the last step ends the episode."""
    return bool(steps) and _ends(steps[-1])


def _ends(step: Sequence[OracleAction]) -> bool:
    return any(isinstance(action, Done | Fail) for action in step)


def _ended(steps: Sequence[tuple[OracleAction, ...]]) -> OracleSteps:
    return tuple(steps) if ends(tuple(steps)) else (*steps, (Done(),))
