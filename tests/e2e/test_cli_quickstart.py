"""`envd quickstart` in its own process: what it prints works when it is copied."""

import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

from tests.support.program import Program


def test_the_printed_addresses_and_the_printed_program_work(tmp_path: Path) -> None:
    command = ("-m", "envd", "quickstart", "--state-dir", tmp_path / "state")
    with Program(sys.executable, *command, "--listen", "127.0.0.1:0", "--console-listen", "127.0.0.1:0") as envd:
        console = envd.wait_for(r"watch: +(http://\S+)")
        envd.wait_for(r"(Ctrl-C ends it)")
        assert "score: 1\n" in envd.output
        with urllib.request.urlopen(console) as response:  # noqa: S310 - it came from our own process
            assert b"<title>" in response.read()
        _, _, rest = envd.output.partition("in a second terminal:\n")
        program = textwrap.dedent(rest.partition("\n\n")[0])
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
        assert done.stdout.startswith("Type exactly this line")
        assert (tmp_path / "after.png").stat().st_size > 1000
        assert envd.end(signal.SIGINT) == 128 + signal.SIGINT
