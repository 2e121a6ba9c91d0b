"""Bundles in CUA-Gym's format, made up: `python -m tests.cua_gym.bundles DIR`, then `envd tasks attack` on them.

DIR gets 200 bundles (`tasks`) and `oracles.jsonl`, with wrong solutions. Five kinds of results are judged by checks of
four strictnesses, so it is known which wrong solution each check accepts. Every 19th bundle is broken: it may have no
score. `--results FILE` counts what an attack found, and prints each result that differs from what the check accepts.
"""

import argparse
import csv
import io
import json
import random
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envd.authoring.attack.mutants import Family
from envd.authoring.attack.report import acceptance
from envd.integrations.cua_gym.bundle import WORKSPACE

COUNT = 200
Record = Mapping[str, str]
_OWNERS = ("Nadia Kern", "Tomas Vella", "Elena Moreau", "Jonas Lind", "Mira Okafor")
_CITIES = ("Bremen", "Porto", "Ghent", "Tartu", "Graz")
_RESULTS = f"{WORKSPACE}/results"
_CONTEXT = f"{WORKSPACE}/context"


class Kind(NamedTuple):
    """A kind of result: its path below `results`, its text, and Python that reads it into the dictionary `found`."""

    path: str
    text: Callable[[Record], str]
    reader: str


def _csv_text(record: Record) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([record.keys(), record.values()])
    return lines.getvalue()


KINDS: Mapping[str, Kind] = {
    "text": Kind(
        "report.txt",
        lambda record: "".join(f"{key}: {value}\n" for key, value in record.items()),
        "found = dict(line.split(': ', 1) for line in open(path) if ': ' in line)",
    ),
    "json": Kind("report.json", lambda record: json.dumps(record) + "\n", "found = json.load(open(path))"),
    "csv": Kind("report.csv", _csv_text, "found = next(csv.DictReader(open(path)))"),
    "settings": Kind(
        "report.ini",
        lambda record: "[order]\n" + "".join(f"{key} = {value}\n" for key, value in record.items()),
        "read = configparser.ConfigParser(); read.read_file(open(path)); found = dict(read['order'])",
    ),
    # A directory for each field, with a file named by the value.
    "files": Kind(
        "report",
        lambda record: "\n".join(f"{key}/{value}" for key, value in record.items()),
        "found = {each.parent.name: each.name for each in pathlib.Path(path).glob('*/*')}",
    ),
}
#: Python that sets the share of right fields, from `found`, `wanted`, and `asked`, the fields that the check looks at.
STRICTNESSES: Mapping[str, str] = {
    "exact": "scores = {key: found.get(key) == wanted[key] for key in wanted}; scores['context'] = kept",
    "values": "scores = {key: found.get(key) == wanted[key] for key in asked}",
    "contained": "scores = {key: wanted[key].lower() in found.get(key, '').lower() for key in asked}",
    "shape": "scores = {key: bool(found.get(key)) for key in asked}",
}
_ASKED = ("owner", "total")
_CHECK = """\
#!/usr/bin/env bash
set -euo pipefail
python3 - <<'PY'
import configparser, csv, json, pathlib
path, errors = '{results}/{path}', []
wanted, asked = json.load(open('{workspace}/gt/expected.json')), {asked!r}
context = pathlib.Path('{workspace}/context/order.txt')
kept = context.is_file() and context.read_text() == open('{workspace}/gt/order.txt').read()
try:
    {reader}
    found = {{key: value.strip() for key, value in found.items()}}
except Exception as error:
    found, errors = {{}}, [repr(error)]
{strictness}
score = sum(scores.values()) / len(scores)
print(json.dumps({{'overall_score': score, 'subscores': scores, 'errors': errors}}))
PY
"""
_SETUP = f"""\
#!/usr/bin/env bash
set -euo pipefail
mkdir -p {_RESULTS}
test -s {_CONTEXT}/order.txt
chmod 777 {_RESULTS}
"""
#: What replaces a script of a broken bundle, by the reason that its mutants must have.
BROKEN: Sequence[tuple[str, str, str]] = (
    ("check.sh", "echo '{\"overall_score\": 1}'; exit 3\n", "EVALUATOR_FAILED"),
    ("check.sh", "echo checked\n", "EVALUATOR_FAILED"),
    ("check.sh", "echo '{\"overall_score\": 2}'\n", "EVALUATOR_FAILED"),
    ("setup.sh", "exit 1\n", "NOT_PLAYED"),
)


#: No multiple of the number of kinds, so that bundles of all kinds are broken.
_BROKEN_EVERY = 19


class Solution(NamedTuple):
    """A solution: what it writes, or what it does after the oracle, and the strictnesses that accept it."""

    name: str
    family: Family
    change: Callable[[dict[str, str]], Record]
    accepted_by: frozenset[str]
    command: str = ""


def _other_total(record: Record) -> str:
    return str(int(record["total"]) + 1)


_NOT_EXACT = frozenset(STRICTNESSES) - {"exact"}
SOLUTIONS = (
    Solution("right", Family.REPEATED, lambda record: record, frozenset(STRICTNESSES)),
    Solution("total differs", Family.ALMOST, lambda r: {**r, "total": _other_total(r)}, frozenset({"shape"})),
    Solution("other case", Family.ALMOST, lambda r: {**r, "owner": r["owner"].swapcase()}, _NOT_EXACT - {"values"}),
    Solution("city differs", Family.ALMOST, lambda r: {**r, "city": "Riga"}, _NOT_EXACT),
    Solution(
        "two totals", Family.HEDGED, lambda r: {**r, "total": f"{r['total']} or {_other_total(r)}"},
        _NOT_EXACT - {"values"},
    ),
    Solution("nothing in it", Family.LAZY, lambda _: {}, frozenset()),
    Solution("input deleted", Family.DAMAGE, lambda record: record, _NOT_EXACT, f"rm {_CONTEXT}/order.txt"),
    Solution("result deleted", Family.EARLY, lambda record: record, frozenset(), f"rm -r {_RESULTS}/*"),
    Solution(
        "link to the truth", Family.KNOWING, lambda _: {}, frozenset(), f"ln -sfn ../gt/expected.json {_RESULTS}/*"
    ),
)  # fmt: skip


class Bundle(NamedTuple):
    """A bundle that the number decides: kind, strictness, and what is broken in it."""

    number: int

    @property
    def name(self) -> str:
        return f"order-{self.number:03}"

    @property
    def kind(self) -> str:
        return list(KINDS)[self.number % len(KINDS)]

    @property
    def strictness(self) -> str:
        return list(STRICTNESSES)[self.number // len(KINDS) % len(STRICTNESSES)]

    @property
    def broken(self) -> tuple[str, str, str] | None:
        return BROKEN[self.number // _BROKEN_EVERY % len(BROKEN)] if (self.number + 1) % _BROKEN_EVERY == 0 else None

    @property
    def amounts(self) -> list[int]:
        return random.Random(self.number).sample(range(20, 400), 4)

    @property
    def record(self) -> dict[str, str]:
        draw = random.Random(self.number)
        values = draw.choice(_OWNERS), draw.choice(_CITIES), str(sum(self.amounts)), draw.choice(("open", "paid"))
        return dict(zip(("owner", "city", "total", "status"), values, strict=True))

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the paths and contents of the bundle's files."""
        kind, record = KINDS[self.kind], self.record
        order = "".join(f"{key}: {record[key]}\n" for key in ("owner", "city", "status"))
        order += "".join(f"item: {amount}\n" for amount in self.amounts)
        form = kind.text(dict.fromkeys(record, "VALUE"))
        check = _CHECK.format(
            results=_RESULTS, workspace=WORKSPACE, path=kind.path, asked=_ASKED, reader=kind.reader,
            strictness=STRICTNESSES[self.strictness],
        )  # fmt: skip
        scripts = {"setup.sh": _SETUP, "check.sh": check}
        if self.broken:
            scripts[self.broken[0]] = self.broken[1]
        yield from scripts.items()
        yield "meta.json", json.dumps({"id": self.name, "driver": "uda-gym", "timeout_seconds": 1800})
        yield "exec/context/order.txt", order
        yield "gt/order.txt", order
        yield "gt/expected.json", json.dumps(record)
        yield (
            "instruction.md",
            f"Write owner, city, total (the sum of the items) and status of {_CONTEXT}/order.txt to"
            f" {_RESULTS}/{kind.path}, in this form:\n\n{form}\n",
        )

    def command(self, solution: Solution) -> str:
        """Return the shell command that performs a solution."""
        kind = KINDS[self.kind]
        text, path = kind.text(solution.change(self.record)), f"{_RESULTS}/{kind.path}"
        if self.kind == "files":
            paths = [shlex.quote(f"{path}/{line}") for line in text.splitlines()]
            made = "".join(f'; mkdir -p "$(dirname {each})"; touch {each}' for each in paths)
            return f"mkdir -p {path}{made}" + (f"; {solution.command}" if solution.command else "")
        return f"printf %s {shlex.quote(text)} > {path}" + (f"; {solution.command}" if solution.command else "")

    def accepts(self, solution: Solution) -> bool:
        return self.strictness in solution.accepted_by

    def line(self) -> dict[str, Any]:
        """Return the bundle's line of oracles: the right solution, and all of `SOLUTIONS` as own mutants."""
        mutants = [
            {"name": each.name, "family": each.family.value, "steps": _steps(self.command(each))} for each in SOLUTIONS
        ]
        return {"task_id": f"cua-gym/{self.name}", "steps": _steps(self.command(SOLUTIONS[0])), "mutants": mutants}


def _steps(command: str) -> list[list[Any]]:
    return [[{"run_shell": {"command": command}}], ["done"]]


def write(directory: Path, count: int = COUNT) -> None:
    """Write the bundles, and the oracles."""
    bundles = [Bundle(number) for number in range(count)]
    for bundle in bundles:
        for name, text in bundle.files():
            file = directory / "tasks" / bundle.name / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(bundle.line()) + "\n" for bundle in bundles)
    (directory / "oracles.jsonl").write_text(lines, encoding="utf-8")


def report(results: Path) -> Iterator[str]:
    """Yield a row of a table for each kind of solution, then each result that is not as the check is made to score.

    A mutant without a score is played again, so its last result counts; one with a score must have no other.
    """
    solutions = {each.name: each for each in SOLUTIONS}
    tallies: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    reasons: Counter[str] = Counter()
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    scored = Counter(line["digest"] for line in lines if line["score"] is not None)
    differing = [f"{digest} was scored {count} times" for digest, count in scored.items() if count > 1]
    last = {line["digest"]: line for line in lines}
    for result in last.values():
        bundle, name = Bundle(int(result["task_id"].rpartition("-")[2])), result["mutant"].removeprefix("own: ")
        solution = solutions[name]
        accepted = result["score"] is not None and result["score"] == 1
        expected_reason = bundle.broken[2] if bundle.broken else ""
        if result["reason"] != expected_reason or (not bundle.broken and accepted != bundle.accepts(solution)):
            differing.append(f"{result['task_id']} {bundle.kind} {bundle.strictness} {name}: {result['score']}")
        if result["reason"]:
            reasons[result["reason"]] += 1
        else:
            tally = tallies[solution.family.value][bundle.name]
            tally[0] += accepted
            tally[1] += 1
    for family, tasks in sorted(tallies.items()):
        row = acceptance("cua-gym", family, [(accepted, count) for accepted, count in tasks.values()])
        yield (
            f"| `{family}` | {row.task_count} | {row.mutant_count} | {row.accepted_count} |"
            f" {row.accepted_count / row.mutant_count:.0%} ({row.low:.0%} to {row.high:.0%}) |"
        )
    yield f"mutants: {len(last)}; without a score: {dict(reasons)}"
    yield from (f"differs: {each}" for each in differing)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the bundles, or print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--results", type=Path, help="`results.jsonl` of an attack: count it")
    given = parser.parse_args(arguments)
    if given.results:
        print(*report(given.results), sep="\n")
    else:
        write(given.directory)


if __name__ == "__main__":
    main()
