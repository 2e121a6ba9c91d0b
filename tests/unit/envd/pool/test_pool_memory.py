"""How many machines a host's memory allows, and reading it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from envd.base.errors import ConfigError, HypervisorError
from envd.pool.memory import HostClaims, HostMemory, MemoryClaim, machines_that_fit, read_available_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("available_mib", "held_mib", "room"),
    [
        pytest.param(1024, [], 0, id="the reserve is not available"),
        pytest.param(1024 + 255, [], 0, id="a part of a machine is none"),
        pytest.param(1024 + 600, [], 2, id="the rest is divided"),
        pytest.param(1024 + 600, [0], 1, id="a new machine has all its growth before it"),
        pytest.param(1024 + 600, [200], 2, id="what a machine holds it need not be given"),
        pytest.param(1024 + 600, [900], 2, id="one that outgrew what was expected takes nothing from the others"),
        pytest.param(512, [0, 0], 0, id="too little is none, not less"),
    ],
)
def test_expected_growth_counts_as_taken(available_mib: int, held_mib: list[int], room: int) -> None:
    assert room == machines_that_fit(
        [MemoryClaim(expected_bytes=256 * MIB, held_bytes=held * MIB) for held in held_mib],
        available_bytes=available_mib * MIB,
        reserve_bytes=1024 * MIB,
        expected_bytes=256 * MIB,
    )


def test_pools_share_one_host() -> None:
    memory = HostMemory(reserve_bytes=0, read=lambda: 1024 * MIB)

    def claims() -> list[MemoryClaim]:
        return [MemoryClaim(expected_bytes=512 * MIB)]

    memory.join(claims)
    assert memory.room(256 * MIB) == 2
    memory.leave(claims)
    memory.leave(claims)
    assert memory.room(256 * MIB) == 4


def test_available_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000000 kB\nMemAvailable:    2048 kB\n", encoding="ascii")
    assert read_available_bytes(meminfo) == 2 * MIB
    assert read_available_bytes() > 0


@pytest.mark.parametrize("text", ["MemTotal: 1 kB\n", "MemAvailable: much\n"])
def test_an_unreadable_meminfo_is_an_error(tmp_path: Path, text: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(text, encoding="ascii")
    with pytest.raises(HypervisorError, match="meminfo"):
        read_available_bytes(meminfo)
    with pytest.raises(HypervisorError, match="read"):
        read_available_bytes(tmp_path / "none")


#: A daemon with 10 machines' worth of available memory, which reports the room for machines of 100 MiB and, given a
#: number, has that many of them.
DAEMON = """
import sys
from pathlib import Path
from envd.pool.memory import HostClaims, HostMemory, MemoryClaim
MIB = 1 << 20
claims = []
memory = HostMemory(reserve_bytes=24 * MIB, host=HostClaims(Path(sys.argv[1])), read=lambda: 1024 * MIB)
memory.join(lambda: claims)
while True:
    print(memory.room(100 * MIB), flush=True)
    count = sys.stdin.readline()
    claims[:] = [MemoryClaim(expected_bytes=100 * MIB)] * int(count)
    memory.publish()
    print("published", flush=True)
    sys.stdin.readline()
"""


class Daemon:
    """A process with its own claims on the memory."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def room(self) -> int:
        """Return the room that the daemon has found."""
        return int(self.read())

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def has(self, count: int) -> None:
        """Have this many machines, published."""
        self.write(str(count))
        assert self.read() == "published\n"

    def end(self) -> None:
        """Kill the daemon."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_the_daemons_of_a_host_together_never_exceed_its_memory(tmp_path: Path) -> None:
    first, second = Daemon(tmp_path), Daemon(tmp_path)
    try:
        # In either order: the second finds nothing until the first has reported how much it takes.
        assert sorted([first.room(), second.room()]) == [0, 10]
        first.has(6)
        second.has(0)
        second.write("look")
        assert second.room() == 4
        second.has(4)
        first.write("look")
        # Its own 6 and the other's 4 are all that fit.
        assert first.room() == 0
        first.end()
        second.write("look")
        assert second.room() == 6, "the claims of a killed daemon remain"
        assert len(list(tmp_path.iterdir())) == 2, "the killed daemon's file remains"
    finally:
        first.end()
        second.end()


def test_claims_of_another_host_that_mounts_the_directory_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "another-boot.x").write_text("1000000000000", encoding="ascii")
    claims = HostClaims(tmp_path)
    assert HostMemory(reserve_bytes=0, host=claims, read=lambda: 1024 * MIB).room(256 * MIB) == 4
    claims.close()
    assert sorted(os.listdir(tmp_path)) == ["another-boot.x", "lock"]


def test_a_claim_is_not_withdrawn_while_another_daemon_reads_it(tmp_path: Path) -> None:
    reader, ending = HostClaims(tmp_path), HostClaims(tmp_path)
    thread = threading.Thread(target=ending.close)
    with reader.exclusive():
        thread.start()
        thread.join(0.2)
        assert len(os.listdir(tmp_path)) == 3
    thread.join()
    assert len(os.listdir(tmp_path)) == 2
    reader.close()


def test_claims_in_an_unusable_directory_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another --cache-dir"):
        HostClaims(tmp_path / "file")
