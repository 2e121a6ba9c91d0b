"""CONTRIBUTING.md: its map names every package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_map_of_the_code_names_every_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Map of the code")[2].partition("\n## ")[0]
    packages = [path.parent.name for tree in ("envd", "trainer") for path in (ROOT / tree).glob("*/__init__.py")]
    assert len(packages) > 20
    assert [name for name in packages if not re.search(rf"\b{name}\b", section)] == []
