"""Sizes of packages and modules, in lines of Python. A package that must grow gets another budget in the same commit,
whose message says why."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 600
BUDGETS = {
    "envd/api": 3250,
    "envd/authoring": 3000,
    "envd/base": 4496,
    "envd/bench": 3660,
    "envd/cli": 5110,
    "envd/console": 1300,
    "envd/daemon": 1400,
    "envd/desktop": 5780,
    "envd/drawn": 5750,
    "envd/episodes": 7800,
    "envd/guests": 4750,
    "envd/hypervisor": 8400,
    "envd/images": 3150,
    "envd/integrations": 7050,
    "envd/pool": 3240,
    "envd/tasks": 6770,
    "trainer/adapters": 3400,
    "trainer/agent": 4500,
    "trainer/cli": 2050,
    "trainer/data": 1650,
    "trainer/evaluate": 1680,
    "trainer/gateway": 2470,
    "trainer/hosts": 450,
    "trainer/learn": 4748,
    "trainer/recipes": 100,
    "trainer/replay": 630,
    "trainer/rewards": 600,
    "trainer/sight": 650,
    "trainer/slime": 3220,
    "trainer/tokens": 1060,
    "proto/cuaenv": 7825,
}


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def modules_of(package: Path) -> list[Path]:
    return [path for path in sorted(package.rglob("*.py")) if "_pb2" not in path.name]


def test_every_package_has_a_budget() -> None:
    packages = {path.parent for tree in ("envd", "trainer") for path in (ROOT / tree).glob("*/__init__.py")}
    assert len(packages) > 20
    assert {str(path.relative_to(ROOT)) for path in packages} <= BUDGETS.keys()


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_stays_within_its_budget(package: str) -> None:
    modules = modules_of(ROOT / package)
    assert modules
    assert sum(map(line_count, modules)) <= BUDGETS[package]
    assert [str(path) for path in modules if line_count(path) > MAX_MODULE_LINES] == []
