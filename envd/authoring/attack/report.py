"""Reviewed verdicts on mutants, the tasks that passed, and the report of an attack, also as a page for people."""

import html
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuaenv.problems import first_problem, without_path
from envd.authoring.attack.mutants import attack_digest, playable
from envd.authoring.attack.playing import Attack
from envd.authoring.results import embedded_png, page
from envd.base.errors import ConfigError
from envd.tasks.basis import judged_digest
from envd.tasks.model import Task


class Verdict(BaseModel):
    """What a reviewer found about a mutant that a checker did not score as expected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    mutant: str
    digest: str
    """See `Mutant.digest`: a verdict does not hold for another version of the task or the mutant."""
    verdict: Literal["equivalent", "wrong", "undecided"]
    """`equivalent`: it solves the task, too (or the oracle rightly fails). `wrong`: a fault of the checker."""
    why: str


_VERDICTS = TypeAdapter(list[Verdict])
_PASSED = TypeAdapter(dict[str, str])
#: Of the bootstrap.
_DRAWS = 2000
_PASSED_HEAD = """\
# Tasks that passed `envd tasks attack`, written by its option --passed, with a digest of the task, its checkers' code
# and its mutants. `envd tasks verify` refuses tasks of the suites named here that have changed since.
"""


def read_verdicts(path: Traversable) -> dict[str, Verdict]:
    """Return the verdicts of a file by digest; none if there is no file. Raises: ConfigError: it is invalid."""
    if not path.is_file():
        return {}
    try:
        found = _VERDICTS.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")) or [])
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"verdicts {path} cannot be read: {_problem(error)}") from error
    return {each.digest: each for each in found}


def read_passed(path: Traversable) -> dict[str, str]:
    """Return the digests of the tasks that passed an attack, by id: see `attack_digest`. Raises: ConfigError."""
    if not path.is_file():
        return {}
    try:
        return _PASSED.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"passed tasks {path} cannot be read: {_problem(error)}") from error


def _problem(error: Exception) -> str:
    return first_problem(error.errors()) if isinstance(error, ValidationError) else without_path(error)


def write_passed(path: Path, tasks: Iterable[Task], report: "AttackReport", *, runs_guests: bool) -> None:
    """Write down which of these tasks passed: all their mutants were played and none is open. Keeps other tasks."""
    passed = read_passed(path)
    played = {each.digest for each in report.results}
    failed = {each.task_id for each in report.open}
    for task in tasks:
        own = judged_digest(task)
        wanted = {mutant.digest(own) for mutant in playable(task, runs_guests=runs_guests)}
        passed.pop(task.task_id, None)
        if wanted <= played and task.task_id not in failed:
            passed[task.task_id] = attack_digest(task, runs_guests=runs_guests)
    path.write_text(_PASSED_HEAD + yaml.safe_dump(passed), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many wrong mutants of a family the checkers of a suite accept."""

    suite: str
    family: str
    task_count: int
    mutant_count: int
    """How many have a score; those that solve the task are left out."""
    accepted_count: int
    low: float
    """Lower end of the 95 % interval of the share, by a bootstrap over tasks."""
    high: float

    def __str__(self) -> str:
        share = self.accepted_count / self.mutant_count
        return (
            f"{self.accepted_count} of {self.mutant_count} wrong mutants accepted (tasks: {self.task_count}),"
            f" {share:.0%} ({self.low:.0%} to {self.high:.0%})"
        )


def acceptance(suite: str, family: str, tallies: Sequence[tuple[int, int]]) -> Acceptance:
    """Return the row of tasks, each with how many of its mutants were accepted and how many were scored.

    Mutants of one task are alike, so the bootstrap draws whole tasks. If all or none of the mutants are accepted, the
    other end of the interval is that of the rule of three, in tasks. One task does not bound the share of others.
    """
    draw = random.Random(0)  # noqa: S311 -- for statistics
    shares = []
    for _ in range(_DRAWS):
        drawn = draw.choices(tallies, k=len(tallies))
        shares.append(sum(each[0] for each in drawn) / sum(each[1] for each in drawn))
    shares.sort()
    low, high = shares[int(_DRAWS * 0.025)], shares[int(_DRAWS * 0.975) - 1]
    accepted, count = (sum(column) for column in zip(*tallies, strict=True))
    bound = min(1.0, 3 / len(tallies))
    if len(tallies) == 1:
        low, high = 0.0, 1.0
    elif accepted == 0:
        high = bound
    elif accepted == count:
        low = 1 - bound
    return Acceptance(suite, family, len(tallies), count, accepted, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackReport:
    """The results of an attack with their verdicts."""

    results: Sequence[Attack]
    verdicts: Mapping[str, Verdict]

    def state_of(self, result: Attack) -> str:
        """Return `killed` or `impossible`, or the verdict on a survivor: `survivor` without one, `no score` if none."""
        if result.is_killed:
            return "impossible" if result.impossible else "killed"
        verdict = self.verdicts.get(result.digest)
        return verdict.verdict if verdict else "no score" if result.score is None else "survivor"

    @property
    def open(self) -> list[Attack]:
        """Results that are neither killed nor equivalent."""
        return [each for each in self.results if self.state_of(each) not in _SETTLED]

    @property
    def passed(self) -> bool:
        """Whether all mutants that are not equivalent were killed."""
        return not self.open

    def counts(self) -> dict[str, Counter[str]]:
        counts: dict[str, Counter[str]] = {}
        for each in self.results:
            counts.setdefault(each.task_id.partition("/")[0], Counter())[self.state_of(each)] += 1
        return counts

    def acceptance(self) -> list["Acceptance"]:
        """Return for each suite and family how many wrong mutants its checkers accept."""
        tallies: dict[tuple[str, str], dict[str, list[int]]] = {}
        for each in self.results:
            if each.expects_success or each.score is None or self.state_of(each) == "equivalent":
                continue
            of_task = tallies.setdefault((each.task_id.partition("/")[0], each.family), {})
            tally = of_task.setdefault(each.task_id.partition("?")[0], [0, 0])
            tally[0] += not each.is_killed
            tally[1] += 1
        return [
            acceptance(suite, family, [(accepted, count) for accepted, count in of_task.values()])
            for (suite, family), of_task in sorted(tallies.items())
        ]

    def as_json(self) -> dict[str, object]:
        suites = {
            suite: {"mutants": count.total(), "not_equivalent": _real(count), **count}
            for suite, count in self.counts().items()
        }
        accepted = [asdict(each) for each in self.acceptance()]
        return {
            "suites": suites,
            "acceptance": accepted,
            "open": [_plain(each, self.state_of(each)) for each in self.open],
        }

    def print(self, console: Console) -> None:
        if self.open:
            table = Table("task", "mutant", "score", "state", "digest", "evidence", box=None, pad_edge=False)
            for each in self.open:
                score = "-" if each.score is None else f"{each.score:g}"
                cells = (each.task_id, each.mutant, score, self.state_of(each), each.digest, each.detail[:160])
                table.add_row(*map(escape, cells))
            console.print(table)
        for suite, count in self.counts().items():
            console.print(
                f"{suite}: {count['killed']} of {_real(count)} mutants killed, {count['equivalent']} equivalent,"
                f" {count['impossible']} impossible",
                markup=False,
            )

        for row in self.acceptance():
            console.print(f"{row.suite}, {row.family}: {row}", markup=False)
        if survivors := [each for each in self.open if self.state_of(each) == "survivor"]:
            console.print(
                f"survivors: {len(survivors)}; fix the checker or add verdicts to verdicts.yaml (--verdicts), such as:",
                _verdict_entry(survivors[0]),
                sep="\n",
                markup=False,
                soft_wrap=True,
            )

    def page(self) -> str:
        """Return the report as one HTML page. It runs no script; texts of guests are escaped."""
        counts = (
            (suite, count["killed"], _real(count), count["equivalent"], count["impossible"])
            for suite, count in self.counts().items()
        )
        headings = ("suite", "killed", "of", "equivalent", "impossible")
        return page("Checkers under attack", headings, counts, map(self._section, self._shown()))

    def _shown(self) -> Iterable[Attack]:
        return (each for each in self.results if not each.is_killed)

    def _section(self, result: Attack) -> str:
        verdict = self.verdicts.get(result.digest)
        image = embedded_png(result.picture, "final screen")
        script = html.escape("\n".join(result.script))
        why = f"<p>{html.escape(verdict.why)}</p>" if verdict else ""
        return (
            f"<section><h2>{html.escape(result.task_id)}: {html.escape(result.mutant)}</h2>"
            f"<p>{self.state_of(result)}; score {result.score}; digest <code>{result.digest}</code></p>{why}"
            f"<pre>{script}</pre><p>{html.escape(result.detail)}</p>{image}</section>"
        )


def _verdict_entry(found: Attack) -> str:
    """Return a line for the file of verdicts."""
    entry = Verdict(task=found.task_id, mutant=found.mutant, digest=found.digest, verdict="equivalent", why="REASON")
    return yaml.safe_dump([entry.model_dump()], default_flow_style=None, sort_keys=False, width=1000).strip()


def _real(count: Counter[str]) -> int:
    """Return how many mutants a sound checker kills."""
    return count.total() - count["equivalent"] - count["impossible"]


def _plain(result: Attack, state: str) -> dict[str, Any]:
    return {**result.model_dump(), "picture": len(result.picture), "state": state}


_SETTLED = ("killed", "equivalent", "impossible")
