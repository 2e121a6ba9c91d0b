"""`python -m envd.integrations.osworld.run`, with a stand-in for OSWorld's checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

from envd.integrations.osworld.run import main

RUNNER = """\
import sys
from desktop_env import desktop_env

if __name__ == "__main__":
    _, provider = desktop_env.create_vm_manager_and_provider("docker", None)
    print(sys.argv, provider)
"""


@pytest.mark.parametrize("path", ["run.py", "scripts/python/run_multienv.py"])
def test_a_runner_gets_its_arguments_and_machines_of_envd(tmp_path: Path, path: str) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "desktop_env").mkdir(parents=True)
    (checkout / "desktop_env" / "__init__.py").touch()
    (checkout / "desktop_env" / "desktop_env.py").write_text("create_vm_manager_and_provider = None\n")
    runner = checkout / path
    runner.parent.mkdir(parents=True, exist_ok=True)
    runner.write_text(RUNNER)
    process = subprocess.run(
        [sys.executable, "-m", "envd.integrations.osworld.run", runner, "--headless"],
        env={"PYTHONPATH": ":".join(sys.path), "ENVD_ADDRESS": "127.0.0.1:5"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"['{runner}', '--headless'] <EnvdProvider 127.0.0.1:5 without a machine>\n"


def test_a_runner_must_be_given_and_be_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"runner .*missing\.py: not a file; name a script"):
        main([str(tmp_path / "missing.py")])
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "RUNNER.py [ARGUMENT ...]" in capsys.readouterr().out
