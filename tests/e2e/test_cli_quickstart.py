"""`envd quickstart` in its own process: what it prints works when it is copied."""

import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.support.containers import desktop_image
from tests.support.program import Program


def test_the_printed_addresses_and_the_printed_programs_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # the virtual environment is not activated
    monkeypatch.chdir(tmp_path)
    command = ("-m", "envd", "quickstart", "--state-dir", tmp_path / "state")
    with Program(sys.executable, *command, "--listen", "127.0.0.1:0", "--console-listen", "127.0.0.1:0") as envd:
        console = envd.wait_for(r"watch: +(http://\S+)")
        envd.wait_for(r"(Ctrl-C ends it)")
        assert "score: 1\n" in envd.output
        with urllib.request.urlopen(console) as response:  # noqa: S310 - it came from our own process
            assert b"<title>" in response.read()
        python, _, rest = envd.output.partition("in this directory, with ")[2].partition(":\n\n")
        snippet = rest.partition("\n\n")[0]
        done = subprocess.run([python, "-c", snippet], cwd=tmp_path, check=True, capture_output=True, text=True)
        assert done.stdout.startswith("Type exactly this line")
        listed = shlex.split(envd.wait_for(r"list: +(.+)"))
        tasks = subprocess.run(listed, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        assert "fake/save-note" in tasks
        assert (tmp_path / "after.png").stat().st_size > 1000
        assert envd.end(signal.SIGINT) == 128 + signal.SIGINT


@pytest.mark.native
@pytest.mark.timeout(600)
def test_a_real_desktop_is_served_in_a_container() -> None:
    desktop_image()
    with tempfile.TemporaryDirectory(prefix="envd-", dir="/var/tmp") as state_dir:
        command = ("-m", "envd", "quickstart", "--real", "--state-dir", state_dir)
        with Program(sys.executable, *command, "--listen", "127.0.0.1:0", "--console-listen", "127.0.0.1:0") as envd:
            envd.wait_for(r"(Ctrl-C ends it)", timeout_s=300)
            assert "score: 1\n" in envd.output
            assert 'client.reset("desktop/' in envd.output
            assert envd.end(signal.SIGINT) == 128 + signal.SIGINT
        assert list(Path(state_dir, "quickstart/containers").iterdir()) == []
