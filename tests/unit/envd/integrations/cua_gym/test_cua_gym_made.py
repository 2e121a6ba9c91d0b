"""Made-up bundles in CUA-Gym's format: their checks accept what they are made to accept, and an attack is counted."""

import json
import subprocess
from pathlib import Path

import pytest

from envd.integrations.cua_gym.bundle import WORKSPACE
from envd.integrations.cua_gym.reader import read_bundles
from envd.tasks.model import Task
from tests.cua_gym.bundles import COUNT, KINDS, SOLUTIONS, STRICTNESSES, Bundle, report, write


def played(bundle: Bundle, command: str, workspace: Path) -> float:
    """Return the score of a command in a workspace on this host."""
    for folder in ("results", "context", "gt"):
        (workspace / folder).mkdir(parents=True)
    for name, text in bundle.files():
        if name.startswith(("exec/", "gt/")):
            (workspace / name.removeprefix("exec/")).write_text(text, encoding="utf-8")
    check = dict(bundle.files())["check.sh"]
    for script in (command, check):
        text = script.replace(WORKSPACE, str(workspace))
        done = subprocess.run(["bash", "-c", text], check=True, capture_output=True, timeout=60)
    return float(json.loads(done.stdout)["overall_score"])


@pytest.mark.parametrize("number", [0, 6, 12, 13, 19])
def test_a_check_accepts_what_it_is_made_to_accept(number: int, tmp_path: Path) -> None:
    bundle = Bundle(number)
    assert not bundle.broken
    # The service removes links to the truth, and this host does not.
    solutions = [each for each in SOLUTIONS if each.name != "link to the truth"]
    scores = {
        each.name: played(bundle, bundle.command(each), tmp_path / str(place)) for place, each in enumerate(solutions)
    }
    expected = {each.name for each in solutions if bundle.accepts(each)}
    assert {name for name, score in scores.items() if score == 1} == expected
    assert all(0 <= score <= 1 for score in scores.values())


def test_the_bundles_are_tasks_of_all_kinds_and_strictnesses(tmp_path: Path) -> None:
    write(tmp_path, 40)
    tasks = list(read_bundles(tmp_path / "tasks"))
    assert all(isinstance(each, Task) and not each.needs for each in tasks)
    lines = [json.loads(line) for line in (tmp_path / "oracles.jsonl").read_text().splitlines()]
    assert [each["task_id"] for each in lines] == [each.task_id for each in tasks if isinstance(each, Task)]
    sound = [bundle for bundle in map(Bundle, range(COUNT)) if not bundle.broken]
    combinations = {(bundle.kind, bundle.strictness) for bundle in sound}
    assert combinations == {(kind, strictness) for kind in KINDS for strictness in STRICTNESSES}
    assert len({bundle.broken for bundle in map(Bundle, range(COUNT))} - {None}) == 4


def test_a_report_names_results_that_differ_from_what_the_check_is_made_to_accept(tmp_path: Path) -> None:
    def line(number: int, name: str, score: float | None, reason: str = "") -> str:
        task_id = f"cua-gym/{Bundle(number).name}"
        result = {"task_id": task_id, "mutant": f"own: {name}", "score": score, "reason": reason}
        return json.dumps({**result, "digest": f"{number} {name}"})

    lines = [
        line(0, "right", 1.0),
        line(0, "total differs", 0.8),
        line(15, "total differs", 1.0),
        line(18, "right", None, "UNAVAILABLE"),
        line(18, "right", None, "EVALUATOR_FAILED"),
        line(1, "other case", 1.0),
        line(2, "nothing in it", 0.0),
        line(2, "nothing in it", 0.0),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows = list(report(tmp_path / "results.jsonl"))
    assert "| `almost` | 3 | 3 | 2 | 67% (0% to 100%) |" in rows
    assert "mutants: 6; without a score: {'EVALUATOR_FAILED': 1}" in rows
    assert [row for row in rows if row.startswith("differs")] == [
        "differs: 2 nothing in it was scored 2 times",
        "differs: cua-gym/order-001 json exact other case: 1.0",
    ]
