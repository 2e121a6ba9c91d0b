"""docs/security.md: every defence names a test that there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_is_there() -> None:
    tests = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 40
    assert named - tests == set()


def test_every_defence_names_a_test() -> None:
    defences = PAGE.partition("## Defences")[2].partition("## Not defended")[0]
    rows = [line for line in defences.splitlines() if line.startswith("| ") and not line.startswith("| defence")]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"\| `test_\w+`", row)] == []
