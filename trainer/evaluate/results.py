"""Results of an evaluation as JSON lines: one line about the run, then one line per finished attempt.

Lines are written atomically, so a killed evaluation continues where it stopped. An attempt that was lost to an error is
repeated, and its later line counts, unless the agent may have caused the loss.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self

from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError

from cuaenv.client import Check
from cuaenv.problems import first_problem, without_path
from trainer.agent.ownership import Owner
from trainer.config import InputError


class Run(BaseModel, extra="forbid", frozen=True):
    """What was evaluated: attempts share a file only if all of this is equal."""

    kind: Literal["run"] = "run"
    schema_version: Literal[1] = 1
    label: str
    """Name in tables."""
    settings: Mapping[str, JsonValue]
    """Endpoint, model, sampling, prompt, grammar and budgets."""
    prompt_hash: str
    """Hash of everything in the prompt except the task; equal to the one that training logs."""


class Attempt(BaseModel, extra="forbid", frozen=True):
    """One attempt at one task."""

    kind: Literal["attempt"] = "attempt"
    task_id: str
    suite: str
    level: int
    domain: str
    infeasible: bool
    """The task cannot be done, and declaring that is the solution."""
    seed: int
    outcome: Literal["terminated", "truncated", "failed"]
    """`failed` is a failure of the service: the attempt says nothing about the model."""
    reason: str
    """"done", "fail", the budget that ran out, or the error's name."""
    error: str = ""
    score: float | None = Field(default=None, ge=0, le=1)
    """None for `failed`, and only then: an error is never a score."""
    owner: str = ""
    """Owner of a lost attempt, see `trainer.agent.ownership`; "undecided" if the agent may have caused the loss."""
    guest_end_cause: str = ""
    """Cause, such as POWER_OFF, if the agent ended its guest."""
    basis_digest: str = ""
    """Digest of what the score depends on besides the agent; empty if there is no score."""
    attempt_count: int = 1
    """Episodes played for it; 2 if the host lost the first one's machine."""
    turn_count: int = 0
    parsed_count: int = 0
    """Turns whose reply followed the grammar."""
    seconds: float = 0.0
    episode_id: str = ""
    checks: Sequence[Check] = ()
    replay: str = ""
    """Directory of its replay, relative to the results file; empty if none was kept."""

    @property
    def key(self) -> tuple[str, int]:
        return self.task_id, self.seed

    @property
    def is_error(self) -> bool:
        """Whether it was lost to an error; it then counts only as an error."""
        return self.score is None

    @property
    def succeeded(self) -> bool:
        """Whether the task was done completely; partial credit is not a success."""
        return self.score is not None and self.score >= 1.0


_LINES: TypeAdapter[Run | Attempt] = TypeAdapter(Annotated[Run | Attempt, Field(discriminator="kind")])


class Results:
    """A run and its attempts so far, the latest one per task and seed."""

    def __init__(self, run: Run, attempts: Iterable[Attempt] = ()) -> None:
        self.run = run
        self._by_key = {attempt.key: attempt for attempt in attempts}

    @property
    def attempts(self) -> list[Attempt]:
        return [self._by_key[key] for key in sorted(self._by_key)]

    def is_settled(self, task_id: str, seed: int) -> bool:
        """Whether the attempt need not be made: it has a score, or the agent may have caused its loss."""
        attempt = self._by_key.get((task_id, seed))
        return attempt is not None and (not attempt.is_error or attempt.owner == Owner.UNDECIDED.value)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file, ignoring a last line that a crash cut off.

        Raises:
            InputError: It cannot be read, or a line is invalid.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"results {path} cannot be read: {without_path(error)}; `trainer eval --out` writes them"
            ) from error
        # A crash may have cut off the text after the last newline.
        whole = text.split("\n")[:-1]
        lines = [_line(path, number, line) for number, line in enumerate(whole, 1)]
        if not lines or not isinstance(lines[0], Run):
            raise InputError(f"results {path} do not start with a run line; `trainer eval --out` writes them")
        attempts = []
        for number, line in enumerate(lines[1:], 2):
            if not isinstance(line, Attempt):
                raise InputError(f"{path}:{number} starts another evaluation; a file holds only one")
            attempts.append(line)
        return cls(lines[0], attempts)


class ResultsFile:
    """A results file open for writing. Use as a context manager."""

    def __init__(self, path: Path, run: Run) -> None:
        """Create or continue the file.

        Raises:
            InputError: It belongs to another evaluation, or another process writes it. The file is unchanged.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._file = stack.enter_context(path.open("a+b"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"results {path} are being written by another process; wait for it or end it"
                ) from error
            if path.stat().st_size:
                self.results = Results.read(path)
                _check_same(path, self.results.run, run)
                _cut_half_line(self._file)
            else:
                self.results = Results(run)
                self._write(run)
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, attempt: Attempt) -> None:
        self._write(attempt)
        self.results._by_key[attempt.key] = attempt

    def _write(self, line: Run | Attempt) -> None:
        self._file.write(line.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _cut_half_line(file: BinaryIO) -> None:
    """Remove an incomplete last line that a crash left."""
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def _line(path: Path, number: int, line: str) -> Run | Attempt:
    try:
        return _LINES.validate_json(line)
    except ValidationError as error:
        problem = first_problem(error.errors(), whole="line")
        raise InputError(f"{path}:{number} is not a line of results: {problem}") from error


def _check_same(path: Path, there: Run, wanted: Run) -> None:
    """Raises: InputError: They differ."""
    if there == wanted:
        return
    before, after = _flat(there), _flat(wanted)
    # Other tasks are one difference, however many they are.
    other_tasks = {key for key in before.keys() ^ after.keys() if key.startswith("task_versions.")}
    differing = sorted(key for key in {*before, *after} - other_tasks if before.get(key) != after.get(key))
    problems = [f"{key}: {before.get(key)} in the file, {after.get(key)} now" for key in differing[:4]]
    if other_tasks:
        first = min(other_tasks)
        problems.append(f"{first.partition('.')[2]}: {'only in the file' if first in before else 'not in the file'}")
    shown = "; ".join(problems)
    raise InputError(f"results {path} belong to another evaluation ({shown}); choose another --out, or remove the file")


def _flat(run: Run) -> dict[str, str]:
    """Return each setting under its full name, such as `agent.max_turns`."""
    flat: dict[str, str] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{name}.{key}" if name else key, item)
        else:
            flat[name] = json.dumps(value)

    add("", {"label": run.label, "prompt_hash": run.prompt_hash, **run.settings})
    return flat
