"""What docs/guarantees.md names as proof is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_test_that_proves_a_guarantee_exists() -> None:
    assert len(NAMED) > 40
    missing = [f"{file}::{name}" for file, name in NAMED if name not in functions_of(ROOT / file)]
    assert missing == []


def test_every_guarantee_names_a_test() -> None:
    rows = re.findall(
        r"^\| (?!guarantee|-)(.*) \|$", (ROOT / "docs" / "guarantees.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) > 25
    assert [row for row in rows if "::test_" not in row and row != "--"] == []
