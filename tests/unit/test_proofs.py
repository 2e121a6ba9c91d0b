"""docs/proofs.py: what passed where, and the table that says so."""

import datetime
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.docs import program

ROOT = Path(__file__).parents[2]
TODAY = datetime.date(2026, 1, 2)
MAKEFILE = """RECORD = x
VERSIONS ?= 3.98 3.99
one-proof: deps ## Prove one (needs much)
\t@run
\t@$(RECORD) $@

adapters-proof: ## Prove adapters
\t@$(RECORD) $@/$$name; done

versions-proof: ## Prove versions
\t@$(RECORD) $@/$$version; done

lint: ## Check style
\t@run
"""


@pytest.fixture(scope="module")
def proofs() -> ModuleType:
    return program("proofs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "docs").mkdir()
    requirements = tmp_path / "tests" / "adapters" / "requirements"
    requirements.mkdir(parents=True)
    (requirements / "harbor.txt").write_text("harbor\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "-c", "user.name=n", "-c", "user.email=n@localhost", "commit", "--quiet", "-m", "m")


def test_the_recorded_targets_are_those_of_the_makefile(proofs: ModuleType) -> None:
    assert proofs.passes(ROOT).keys() <= proofs.targets(ROOT).keys()


def test_every_proof_of_the_makefile_records_its_pass(proofs: ModuleType) -> None:
    names = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()}
    wanted = {name for name in names if name.endswith("-proof") and " " not in name}
    assert len(wanted) > 5
    assert wanted <= {name.partition("/")[0] for name in proofs.targets(ROOT)}


def test_a_pass_counts_until_the_tree_changes(proofs: ModuleType, root: Path) -> None:
    versions = ["versions-proof/3.98", "versions-proof/3.99"]
    assert list(proofs.targets(root)) == ["one-proof", "adapters-proof/harbor", *versions]
    assert proofs.missing(root) == ["adapters-proof/harbor", "one-proof", *versions]
    assert proofs.record(root, "one-proof", TODAY).endswith("recorded in docs/proofs.json")
    assert json.loads((root / "docs/proofs.json").read_text())["one-proof"]["date"] == "2026-01-02"
    assert "| `one-proof` | Prove one | `" in proofs.text(root)
    assert proofs.missing(root) == ["adapters-proof/harbor", *versions]
    for part in ("adapters-proof/harbor", *versions):
        proofs.record(root, part, TODAY)
    commit(root)
    assert proofs.missing(root) == []
    (root / "code.py").write_text("changed\n")
    commit(root)
    assert proofs.missing(root) == ["adapters-proof/harbor", "one-proof", *versions]


def test_a_pass_on_a_tree_with_changes_is_not_recorded(proofs: ModuleType, root: Path) -> None:
    (root / "code.py").write_text("changed\n")
    assert "not recorded, because the tree has changes" in proofs.record(root, "one-proof", TODAY)
    assert not (root / "docs/proofs.json").exists()


def test_tests_that_failed_first_on_the_commit_are_named(proofs: ModuleType, root: Path) -> None:
    (root / ".gitignore").write_text("out\n")
    commit(root)
    file = proofs.progress(root, "one-proof")
    file.parent.mkdir(parents=True)
    file.write_text("passed t::a\nfailed t::b\npassed t::b\n")
    proofs.record(root, "one-proof", TODAY)
    assert json.loads((root / "docs/proofs.json").read_text())["one-proof"]["again"] == ["t::b"]
    assert proofs.text(root).endswith(
        "Failed once on their commit, and passed when run again:\n\n- `one-proof`: `t::b`\n"
    )
    (root / "code.py").write_text("changed\n")
    assert proofs.progress(root, "one-proof") is None
    commit(root)
    assert proofs.progress(root, "one-proof") != file


def test_a_commit_that_is_gone_does_not_count(proofs: ModuleType, root: Path) -> None:
    (root / "docs/proofs.json").write_text(json.dumps({"one-proof": {"commit": "0123456789", "date": "2026-01-02"}}))
    assert "one-proof" in proofs.missing(root)


def test_make_release_refuses_a_tree_with_changes(proofs: ModuleType, root: Path) -> None:
    script = root / "docs" / "proofs.py"
    script.write_bytes((ROOT / "docs" / "proofs.py").read_bytes())
    done = subprocess.run(["python3", str(script), "missing"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "release: the tree has changes; commit or remove them\n?? docs/" in done.stderr
    commit(root)
    done = subprocess.run(["python3", str(script), "missing"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "adapters-proof one-proof versions-proof\n")
