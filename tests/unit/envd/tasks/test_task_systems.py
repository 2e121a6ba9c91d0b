"""Foreign suites of tasks are packages that may be absent."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import envd
from envd.tasks.systems import packages, task_systems

ROOT = Path(envd.__file__).parent.parent
PROGRAM = """
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.systems import task_systems
print(sorted(system.checker.__name__ for system in task_systems()))
print(len(TaskCatalogue.load([])) > 20)
"""


@pytest.mark.parametrize("package", packages())
def test_without_a_package_all_other_tasks_are_loaded(package: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "envd", tmp_path / "envd", ignore=shutil.ignore_patterns("__pycache__", "images"))
    shutil.rmtree(tmp_path / package.replace(".", "/"))
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    done = subprocess.run([sys.executable, "-c", path + PROGRAM], capture_output=True, text=True, check=False)
    left = [system.checker for system in task_systems() if not system.checker.__module__.startswith(package)]
    assert len(left) == len(packages()) - 1
    assert done.stdout.splitlines() == [str(sorted(each.__name__ for each in left)), "True"], done.stderr
