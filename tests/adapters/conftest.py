"""Fixtures of the adapters' tests.

A directory NAME here holds the proofs on a framework's own package. They run in the environment `.venv-adapters-NAME`,
made from `requirements/NAME.txt`: see `make adapters-proof`.
"""

import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from envd.api.security.tokens import new_token
from envd.base.config import SecurityConfig
from tests.support.desktops import DrawnDesktops
from tests.support.program import run_program

HERE = Path(__file__).parent
PROOFS = sorted(file.stem for file in (HERE / "requirements").glob("*.txt"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the proofs of other environments, with a message unless this run is a proof."""
    name = collection_path.name
    if collection_path.parent != HERE or name not in PROOFS or Path(sys.prefix).name == f".venv-adapters-{name}":
        return None
    if not Path(sys.prefix).name.startswith(".venv-adapters-"):
        print(f"\nNOT RUN: the proofs of the adapter for {name}. Run: make adapters-proof ADAPTERS={name}")
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the proofs."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.parent.name in PROOFS:
            item.add_marker("adapters")


@pytest.fixture(scope="session")
def served() -> Iterator[DrawnDesktops]:
    """Up to four drawn desktops, served from a thread."""
    desktops = DrawnDesktops(size=2, capacity=4)
    yield desktops
    desktops.close()


@pytest.fixture
def desktops(served: DrawnDesktops) -> Iterator[DrawnDesktops]:
    """Drawn desktops, all of which must be returned at the end of the test."""
    yield served
    served.wait_returned()


@pytest.fixture
def guarded_address(tmp_path: Path) -> Iterator[str]:
    """Address of drawn desktops that require a token."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{new_token('alice', 'run').line}\n", encoding="utf-8")
    tokens.chmod(0o600)
    desktops = DrawnDesktops(security=SecurityConfig(tokens_file=tokens))
    yield desktops.address
    desktops.close()


@pytest.fixture
def example() -> Callable[[str], str]:
    """Return the example of a section of docs/adapters.md."""

    def code_of(section: str) -> str:
        page = (HERE.parent.parent / "docs/adapters.md").read_text(encoding="utf-8")
        (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert len(code.splitlines()) <= 30
        return str(code)

    return code_of


@pytest.fixture
def run_example(desktops: DrawnDesktops, example: Callable[[str], str]) -> Callable[..., Awaitable[str]]:
    """Run the example of a section of docs/adapters.md in a process of its own; return its output."""

    async def run(section: str, *, url: str = "") -> str:
        code = example(section)
        if url:
            assert "http://127.0.0.1:8000" in code
            code = code.replace("http://127.0.0.1:8000", url)
        done = await run_program(sys.executable, "-c", code, env={**os.environ, "ENVD_TARGET": desktops.address})
        assert done.status == 0, done.err
        return done.out

    return run
