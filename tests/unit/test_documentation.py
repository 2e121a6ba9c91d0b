"""CONTRIBUTING.md and the pages of docs: their paths, modules, tests and links exist; the map names every package."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from envd import drawn
from envd.drawn.suite import DRAWN
from envd.tasks import suites
from envd.tasks.catalogue import TaskCatalogue

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Names that look like paths or modules: metrics of `trainer.slime`, files of users, names of other projects.
_OTHERS = re.compile(
    r"envd/(success_frac|void_frac|void|ended|kept|replay|replayed|branched_frac|ended_by_guest_frac|undecided_frac)\b.*|tests/test\.sh|(slime_osworld|examples)/.*|trainer\.(use_v1|v1\..*)"
)
#: `api/servicer.py` is short for `envd/api/servicer.py`.
_BASES = ("envd", "trainer", "proto", "proto/cuaenv", "tests/unit")
_PATH = re.compile(r"(?:envd|trainer|proto|cuaenv|tests|docs|deploy|docker)/[\w./*-]*")
_TASK = re.compile(r"(?<![\w/.{}-])((?:desktop|fake|drawn|windows)/[a-z][a-z0-9-]*)(?![\w/-])(?!\.\w)")
_TEXTS = re.compile(r"[\w-]+\.(md|py|yaml|toml)|.*Dockerfile")
_MODULE = re.compile(r"(?:envd|trainer|cuaenv|tests)(?:\.[a-z_0-9]+)+(?:\.[A-Z]\w*(?:\.\w+)?)?")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def words_of(page: Path) -> Iterator[str]:
    for words in re.findall(r"`([^`\n]+)`", text_of(page)):
        yield from (word for word in re.split(r"[\s,]+|::.*", words) if word and not _OTHERS.fullmatch(word))


def exists(path: str) -> bool:
    path = f"proto/{path}" if path.startswith("cuaenv/") else path
    return bool(list(ROOT.glob(path.rstrip("/"))))


def is_module(name: str) -> bool:
    """Whether a name is a module or a package, or a name within one."""
    parts = name.split(".")
    inner = [".".join(parts[:count]).replace(".", "/") for count in range(len(parts), max(1, len(parts) - 2), -1)]
    return any(exists(f"{path}.py") or (ROOT / path).is_dir() or exists(path) for path in inner)


def test_the_map_of_the_code_names_every_package() -> None:
    section = text_of(ROOT / "CONTRIBUTING.md").partition("## Map of the code")[2].partition("\n## ")[0]
    packages = [path.parent.name for tree in ("envd", "trainer") for path in (ROOT / tree).glob("*/__init__.py")]
    assert len(packages) > 20
    assert [name for name in packages if not re.search(rf"\b{name}\b", section)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_paths_and_modules_exist(page: Path) -> None:
    words = list(words_of(page))
    files = re.compile(r".*\.(toml|yaml|service|db|sock|py|json|rules|log)")
    paths = [word for word in words if _PATH.fullmatch(word) and not exists(word)]
    shorts = [word for word in words if re.fullmatch(r"\w+/[\w/]*\w\.py", word) and not _PATH.fullmatch(word)]
    paths += [short for short in shorts if not any((ROOT / base / short).is_file() for base in _BASES)]
    modules = [word for word in words if _MODULE.fullmatch(word) and not files.fullmatch(word) and not is_module(word)]
    assert (paths, modules) == ([], [])


@cache
def named_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@cache
def all_tests() -> set[str]:
    return set().union(*map(named_in, (ROOT / "tests").rglob("*.py")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_tests_exist(page: Path) -> None:
    text = text_of(page)
    assert [name for name in re.findall(r"`(test_\w+[a-z0-9])`", text) if name not in all_tests()] == []
    in_files = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert [(file, name) for file, name in in_files if name not in named_in(ROOT / file)] == []


def test_every_guarantee_and_every_defence_names_a_test() -> None:
    guarantees = text_of(ROOT / "docs/evidence/guarantees.md")
    defences = text_of(ROOT / "docs/evidence/security.md")
    for section, proof in ((guarantees, "::test_"), (defences, "| `test_")):
        rows = [line for line in section.splitlines() if re.match(r"\| (?!-|guarantee|defence)", line)]
        assert len(rows) > 25
        assert [row for row in rows if proof not in row] == []


def test_named_tasks_exist() -> None:
    """Ids in pages, sources and deployments, such as `desktop/type-greeting`, are tasks of the suites that ship."""
    files = [Path(drawn.__file__).parent / "suite.yaml", Path(suites.__file__).parent / "windows"]
    known = (TaskCatalogue.load(), TaskCatalogue.load(files, include_builtin=False, templates=DRAWN))
    trees = ("docs", "envd", "trainer", "proto", "deploy", "docker")
    texts = [file for tree in trees for file in (ROOT / tree).rglob("*") if re.fullmatch(_TEXTS, file.name)]
    named = {task_id for file in [ROOT / "README.md", *texts] for task_id in re.findall(_TASK, text_of(file))}
    assert len(named) > 20
    assert [task_id for task_id in sorted(named) if not any(each.find(task_id) for each in known)] == []


@cache
def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S))
    broken = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert broken == []


def test_the_walks_of_contributing_name_files_in_order() -> None:
    """Each file of the two walks exists; short names continue in the directory before them."""
    page = text_of(ROOT / "CONTRIBUTING.md")
    for start, tree in (("To follow one **Step**", "envd"), ("To follow one **slime sample**", "")):
        walk = page.partition(start)[2].partition("\n\n")[0]
        names = [name for name in re.findall(r"`([\w/]+\.py)`", walk) if "__init__" not in name]
        assert len(names) > 5
        directory = ROOT / tree
        for name in names:
            found = [base / name for base in (directory, ROOT / tree, ROOT, ROOT / "proto") if (base / name).is_file()]
            assert found, f"{name} after {directory}"
            directory = found[0].parent


def test_decision_records_are_listed_dated_and_short() -> None:
    directory = ROOT / "docs" / "decisions"
    index = text_of(directory / "README.md")
    records = sorted(directory.glob("0*.md"))
    assert len(records) > 15
    for record in records:
        lines = text_of(record).splitlines()
        assert record.name in index
        assert lines[0].startswith(f"# {record.name[:4]}: ")
        assert re.match(r"(Superseded by \d{4}|20\d\d-\d\d-\d\d)", lines[2])
        assert [line for line in lines if line.startswith("## ")][:2] == ["## Context", "## Decision"]
        assert len(lines) <= 60


def test_the_site_has_no_dead_link_and_no_page_without_a_place(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/tutorials/first-episode/index.html").is_file()
    index = (tmp_path / "site/llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", index, re.MULTILINE)
    pages = set(re.findall(r"\]\(([^)#\s]+\.md)\)", text_of(ROOT / "docs/README.md")))
    assert len(set(listed)) == len(pages) > 35
    assert [page for page in listed if not (tmp_path / "site" / page / "index.html").is_file()] == []
