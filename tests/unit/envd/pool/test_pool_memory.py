"""How many machines a host's memory allows, and reading it."""

from pathlib import Path

import pytest

from envd.base.errors import HypervisorError
from envd.pool.memory import HostMemory, MemoryClaim, machines_that_fit, read_available_bytes

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
    with pytest.raises(HypervisorError, match="cannot be read"):
        read_available_bytes(tmp_path / "none")
