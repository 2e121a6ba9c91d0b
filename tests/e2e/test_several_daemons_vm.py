"""Two daemons of one host with a common template directory: one boots the template, and both share its memory."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cuaenv.client import EnvClient
from envd.hypervisor.qemu.processes import machine_pids
from envd.images.catalogue import Image
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 2

[hypervisor]
template_dir = "{template_dir}"
"""


@pytest.fixture
def short_dir(desktop_image: Image) -> Iterator[Path]:
    assert desktop_image.name == "desktop"
    directory = Path(tempfile.mkdtemp(prefix="envd-d-", dir="/tmp"))
    directory.chmod(0o755)  # QEMU's user passes through it.
    yield directory
    shutil.rmtree(directory)


def memory_files(state_dir: Path) -> set[str]:
    """Return the memory files that the daemon's machines map."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in machine_pids(state_dir).values()]
    return {line.split()[-1] for text in maps for line in text.splitlines() if line.endswith(".ram")}


def test_daemons_that_start_together_boot_a_template_once_and_share_its_memory(short_dir: Path) -> None:
    config = CONFIG.format(template_dir=short_dir / "templates")
    with ExitStack() as stack:
        daemons = []
        for name in ("a", "b"):
            daemons.append(ServedDaemon(short_dir / name, config))
            stack.callback(daemons[-1].end)
        addresses = [daemon.wait_for(r"listening on (\S+)") for daemon in daemons]
        for daemon in daemons:
            daemon.wait_for(r"(pool desktop: ready, 1 machines)", timeout_s=600)
        logs = [daemon.log_file.read_text() for daemon in daemons]
        assert sum(len(re.findall(r"template \w+ frozen", log)) for log in logs) == 1
        assert sum("waiting for another daemon, which makes it" in log for log in logs) == 1
        first, second = (memory_files(short_dir / name) for name in ("a", "b"))
        assert len(first) == 1
        assert first == second
        with EnvClient(addresses) as client, client.reset("desktop/type-greeting") as one:
            assert one.observation.frame_id
    # The templates outlive both.
    assert len(list((short_dir / "templates").glob("*/snapshot.json"))) == 1
