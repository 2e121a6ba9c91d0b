"""The digest of what a score depends on changes with each of its parts, and with nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuaenv.region import Region
from envd.base.config import SettlePolicy
from envd.hypervisor.machine import DiskImage, MachineSpec
from envd.tasks import basis
from envd.tasks.catalogue import TaskCatalogue

TASK = next(task for task in TaskCatalogue.load().list() if task.checker and task.setup and task.oracle)
SPEC = MachineSpec(machine_id="m-1", image=DiskImage(name="desktop", digest="d1", disk=Path("/disk"), packages="a 1\n"))
SETTLE = SettlePolicy()
DIGEST = basis.digest_of(TASK, SPEC, SETTLE)


def with_task(**changes: Any) -> str:
    return basis.digest_of(TASK.model_copy(update=changes), SPEC, SETTLE)


@pytest.mark.parametrize(
    "changed",
    [
        with_task(instruction="Do something else."),
        with_task(setup=()),
        with_task(checker=None, infeasible=True),
        with_task(max_steps=TASK.max_steps + 1),
        with_task(version=TASK.version + 1),
        basis.digest_of(TASK, replace(SPEC, image=replace(SPEC.image, digest="d2")), SETTLE),
        basis.digest_of(TASK, replace(SPEC, image=replace(SPEC.image, packages="a 2\n")), SETTLE),
        basis.digest_of(TASK, replace(SPEC, screen_width_px=1024), SETTLE),
        basis.digest_of(TASK, SPEC, SettlePolicy(quiet_ms=301)),
    ],
)
def test_each_part_changes_the_digest(changed: str) -> None:
    assert len(changed) == 64
    assert changed != DIGEST


def test_what_no_score_depends_on_does_not_change_the_digest() -> None:
    elsewhere = replace(SPEC, machine_id="m-2", image=replace(SPEC.image, disk=Path("/elsewhere")))
    assert with_task(oracle=(), tags=("new",), level=5, domain="other") == DIGEST
    assert (
        basis.digest_of(TASK, elsewhere, SETTLE.ignoring((Region(x_px=0, y_px=0, width_px=9, height_px=9),))) == DIGEST
    )


def test_the_code_of_checkers_is_covered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkers").mkdir()
    (tmp_path / "requirements.txt").write_text("desktop-env==1\n")
    file = tmp_path / "checkers" / "files.py"
    monkeypatch.setattr(basis, "files", lambda package: tmp_path)
    digests = []
    for text in ("a = 1\n", "a = 2\n", "a = 1\n"):
        file.write_text(text)
        basis.code_digest.cache_clear()
        digests.append(basis.code_digest())
    basis.code_digest.cache_clear()
    assert digests[0] == digests[2] != digests[1]


def test_code_that_only_names_types_otherwise_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "imports": "from a import B\ndef judge(b: B):\n    return b.score\n",
        "types": "if TYPE_CHECKING:\n    from a import B\ndef judge(b: 'B'):\n    return b.score\n",
        "other": "from a import B\ndef judge(b: B):\n    return 1\n",
        "one": "if TYPE_CHECKING:\n    LIMIT = 1\nelse:\n    LIMIT = 1\n",
        "two": "if TYPE_CHECKING:\n    LIMIT = 1\nelse:\n    LIMIT = 2\n",
    }
    package = tmp_path / "judging_package"
    package.mkdir()
    for name, text in {"__init__": "", **texts}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    digest = {name: basis._module_digest(f"judging_package.{name}") for name in texts}
    assert digest["imports"] == digest["types"] != digest["other"]
    assert digest["one"] != digest["two"]
