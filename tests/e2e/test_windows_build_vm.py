"""Whole builds of Windows images on real machines, with a stand-in for Windows' ISO.

Everything but Windows is real: discs, firmware, TPM, virtual hardware, guest agent, seals and starts.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from PIL import Image as PillowImage

from envd.base.errors import ImageError
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.hypervisor.qemu.processes import machine_pids
from envd.images.catalogue import ImageCatalogue
from envd.images.windows.build import BuildLimits, WindowsBuild
from envd.images.windows.plan import WindowsOptions, plan_build, write_media
from tests.support.windows_installer import make_installer
from tests.support.windows_media import make_virtio_iso, virtio_files

# Installation, two seals and two starts: about 5 min under TCG on an idle host.
pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(3600)]

SCREEN = (1024, 768)
LIMITS = BuildLimits(
    stall=timedelta(minutes=5),
    boot=timedelta(minutes=10),
    shutdown=timedelta(minutes=5),
    still=timedelta(seconds=5),
    unrest=timedelta(minutes=5),
)


@pytest.fixture(scope="module")
def virtio_win(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_virtio_iso(tmp_path_factory.mktemp("virtio") / "virtio-win.iso", virtio_files("w11"))


@pytest.fixture(scope="module")
def installer(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    return make_installer(tmp_path_factory.mktemp("installer") / "windows.iso", cache_dir=cache_dir)


@contextmanager
def temporary_cache(users_own: Path) -> Iterator[Path]:
    """Yield an empty cache, with libvirt's knowledge of QEMU from the user's own."""
    # Below /tmp instead of pytest's deep directory: paths of Unix sockets are limited to 107 bytes.
    with TemporaryDirectory(prefix="envd-t-", dir="/tmp") as directory:
        (users_own / "libvirt").mkdir(parents=True, exist_ok=True)
        (Path(directory) / "libvirt").symlink_to(users_own / "libvirt")
        yield Path(directory)


@pytest.fixture
def own_cache(cache_dir: Path) -> Iterator[Path]:
    with temporary_cache(cache_dir) as cache:
        yield cache


def command(installer: Path, virtio_win: Path, cache: Path, *flags: str) -> list[str]:
    screen = f"{SCREEN[0]}x{SCREEN[1]}"
    return [
        *(sys.executable, "-m", "envd", "image", "build", "windows", "--iso", str(installer)),
        *("--virtio-win", str(virtio_win), "--cache-dir", str(cache), "--screen", screen, "--still", "5"),
        *("--memory-mib", "2048", "--vcpus", "2", "--json", *flags),
    ]


@pytest.fixture(scope="module")
def built(cache_dir: Path, installer: Path, virtio_win: Path) -> Iterator[Path]:
    """Run one build by the command; return its cache."""
    with temporary_cache(cache_dir) as cache:
        done = subprocess.run(command(installer, virtio_win, cache), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (cache / "stdout.json").write_text(done.stdout)
        yield cache


def test_the_image_is_in_the_catalogue_with_its_firmware_tpm_and_expiry(built: Path) -> None:
    image = ImageCatalogue(built).get("win11")
    assert json.loads((built / "stdout.json").read_text())["digest"] == image.digest
    disk = ImageCatalogue(built).disk_image("win11")
    assert disk.firmware_vars is not None
    assert disk.tpm_state is not None
    assert disk.tpm_state.stat().st_size > 0
    assert (image.screen_width_px, image.screen_height_px) == SCREEN
    assert disk.expire_time is not None
    assert disk.expire_time - datetime.fromisoformat(image.created) > timedelta(days=89)
    checked = subprocess.run(["qemu-img", "check", str(disk.disk)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_pictures_show_each_start_at_the_size_asked_for(built: Path) -> None:
    reports = built / "build" / "reports" / "win11"
    for name in ("1-starting", "2-copying", "4-first-logon"):
        assert (reports / f"{name}.png").is_file()
    for name in ("6-desktop", "7-second-start"):
        with PillowImage.open(reports / f"{name}.png") as picture:
            assert picture.size == SCREEN
            assert picture.convert("RGB").getcolors(1) is None, "it is not blank"
    log = (reports / "install.log").read_text()
    assert log.startswith("steps: publishers drivers agent settings clean-up")
    assert not (reports / "last.png").exists()


def test_nothing_else_is_left_of_the_build(built: Path) -> None:
    assert machine_pids(built / "build") == {}
    assert list((built / "build" / "machines").iterdir()) == []
    left = [path.name for path in built.rglob("*") if path.name in {"answers.iso", "autounattend.xml", "boot.qcow2"}]
    assert left == [], "the answer file has a password"
    assert [path.name for path in (built / "images" / "win11").glob(".building-*")] == []


def test_a_second_build_finds_the_image(built: Path, installer: Path, virtio_win: Path) -> None:
    done = subprocess.run(command(installer, virtio_win, built), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["digest"] == ImageCatalogue(built).get("win11").digest


class Fault(NamedTuple):
    """A fault of the stand-in, and what a build says about it."""

    name: str
    problem: str
    limits: BuildLimits = LIMITS


@pytest.mark.parametrize(
    "fault",
    [
        Fault("no-driver", "installation: nothing changed for 5 min (copying Windows)"),
        Fault("wrong-edition", "installation: nothing changed for 5 min (copying Windows)"),
        Fault("no-disk-space", "installation: nothing changed for 5 min (copying Windows)"),
        Fault("failed-step", "first logon: 1 steps failed (program a.exe: ended with status 5)"),
        Fault("no-agent", "did not answer within 3 min", replace(LIMITS, boot=timedelta(minutes=3))),
        Fault(
            "restless", "screen: still moved after 0 s",
            replace(LIMITS, still=timedelta(seconds=20), unrest=timedelta()),
        ),
    ],
    ids=lambda fault: fault.name,
)  # fmt: skip
async def test_a_fault_ends_the_build_with_a_picture_and_logs(
    tmp_path: Path, vm_state_dir: Path, cache_dir: Path, virtio_win: Path, fault: Fault
) -> None:
    iso = make_installer(tmp_path / "windows.iso", cache_dir=cache_dir, fault=fault.name)
    plan = plan_build(WindowsOptions(iso=iso, virtio_win=virtio_win), directory=tmp_path)
    media = write_media(plan, tmp_path)
    hypervisor = await LibvirtHypervisor.open(state_dir=vm_state_dir, cache_dir=cache_dir, images=[media])
    reports = tmp_path / "reports"
    try:
        build = WindowsBuild(
            plan,
            hypervisor,
            directory=tmp_path,
            reports=reports,
            limits=fault.limits,
            memory_mib=2048,
            vcpu_count=2,
            progress=lambda *_: None,
        )
        with pytest.raises(ImageError) as raised:
            await build.run(media)
    finally:
        await hypervisor.close()
    assert fault.problem in str(raised.value)
    with PillowImage.open(reports / "last.png") as picture:
        assert picture.convert("RGB").getcolors(1) is None, "it is not blank"
    assert b"BdsDxe" in (reports / "install-console.log").read_bytes()
    assert machine_pids(vm_state_dir) == {}


def wait_for_machine(process: "subprocess.Popen[bytes]", cache: Path) -> int:
    """Return the process of the build's machine once it shows something."""
    reports = cache / "build" / "reports" / "win11"
    while not (reports / "1-starting.png").exists():
        assert process.poll() is None
        time.sleep(0.1)
    [pid] = machine_pids(cache / "build").values()
    return pid


def test_ctrl_c_ends_the_machine_and_leaves_no_image(own_cache: Path, installer: Path, virtio_win: Path) -> None:
    with subprocess.Popen(command(installer, virtio_win, own_cache), stderr=subprocess.DEVNULL) as process:
        wait_for_machine(process, own_cache)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert machine_pids(own_cache / "build") == {}
    assert list((own_cache / "build" / "machines").iterdir()) == []
    assert list((own_cache / "images").rglob("*")) == []


def test_the_next_build_removes_what_a_killed_one_left(own_cache: Path, installer: Path, virtio_win: Path) -> None:
    with subprocess.Popen(command(installer, virtio_win, own_cache), stderr=subprocess.DEVNULL) as process:
        first = wait_for_machine(process, own_cache)
        process.kill()
    assert list((own_cache / "images" / "win11").glob(".building-*/answers.iso"))
    (own_cache / "build" / "reports" / "win11" / "1-starting.png").unlink()
    with subprocess.Popen(command(installer, virtio_win, own_cache), stderr=subprocess.DEVNULL) as process:
        second = wait_for_machine(process, own_cache)
        assert second != first
        assert not Path(f"/proc/{first}").exists()
        discs = list((own_cache / "images" / "win11").glob(".building-*/answers.iso"))
        assert [disc.parent.name.split("-")[1] for disc in discs] == [str(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait() != 0
    assert machine_pids(own_cache / "build") == {}
    assert list((own_cache / "images").rglob("*")) == []
