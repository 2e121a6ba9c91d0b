"""A build of Windows on scripted machines: what it waits for, what it refuses, what it seals and what it keeps."""

import asyncio
import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as PillowImage
from pydantic import JsonValue

from envd.base.errors import GuestError, GuestUnresponsive, ImageError, MachineLost
from envd.hypervisor.machine import Accelerator, MachineSpec
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.hypervisor.qemu.snapshots.files import QemuFiles, create_overlay
from envd.images.catalogue import Image, ImageCatalogue
from envd.images.windows import build as build_module
from envd.images.windows.build import BuildLimits, build_windows
from envd.images.windows.plan import BuildPlan, WindowsOptions, plan_build, write_media
from tests.support.windows_media import MediumEdition, make_virtio_iso, make_windows_iso, virtio_files

SCREEN = (640, 480)
LIMITS = BuildLimits(
    stall=timedelta(seconds=30),
    boot=timedelta(seconds=30),
    shutdown=timedelta(seconds=30),
    still=timedelta(0),
    unrest=timedelta(seconds=30),
    watch_interval_s=0.001,
)
SOON = timedelta(seconds=0.05)
CONSOLE = b"".join(
    b"envd-setup: %s\r\n" % line for line in (b"windows-pe", b"specialize", b"drivers", b"agent", b"finished")
)


class Guest:
    """What the machines of one build do; tests change parts of it."""

    def __init__(self) -> None:
        self.console = CONSOLE
        self.last_lines = b""
        """Written between the last look and the end."""
        self.powers_off = True
        self.end_reason = "its QEMU ended: the guest shut down"
        self.agent_answers = True
        self.result: bytes | None = b'\xef\xbb\xbf{ "failures": [], "build": 26200, "defender": "Stopped" }'
        self.screen = SCREEN
        self.repaints = False
        self.obeys_shutdown = True
        self.started: list[MachineSpec] = []


class StubMachine:
    """A machine of a guest."""

    def __init__(self, guest: Guest, spec: MachineSpec, directory: Path) -> None:
        self.guest = guest
        self.spec = spec
        self.machine_id = spec.machine_id
        self.files = QemuFiles(directory=directory)
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self.looks = 0
        directory.mkdir()
        create_overlay(self.files.disk, spec.image.disk, "qcow2")
        self.files.firmware_vars.write_bytes(f"vars of {spec.machine_id}".encode())
        self.files.tpm_state.parent.mkdir()
        self.files.tpm_state.write_bytes(f"tpm of {spec.machine_id}".encode())
        self.files.console_log.write_bytes(b"")

    def end(self, reason: str) -> None:
        self.lost_reason = reason
        self.lost.set()

    async def screendump(self) -> npt.NDArray[np.uint8]:
        if self.lost.is_set():
            raise MachineLost(f"machine {self.machine_id} is gone")
        self.looks += 1
        if self.machine_id == "install":
            # A line more at each look, and then the end.
            lines = self.guest.console.splitlines(keepends=True)
            self.files.console_log.write_bytes(b"".join(lines[: self.looks]))
            if self.guest.powers_off and self.looks > len(lines):
                with self.files.console_log.open("ab") as log:
                    log.write(self.guest.last_lines)
                self.end(self.guest.end_reason)
        colour = self.looks % 200 if self.guest.repaints else 7
        return np.full((self.guest.screen[1], self.guest.screen[0], 3), colour, np.uint8)

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        if not self.guest.agent_answers:
            raise GuestUnresponsive(f"machine {self.machine_id}: no response")
        if command == "guest-shutdown":
            if self.guest.obeys_shutdown:
                self.end("its QEMU ended: the guest shut down")
            raise GuestUnresponsive("no response to a shutdown")
        if command == "guest-file-open":
            path = str((arguments or {})["path"])
            if path.endswith("result.json") and self.guest.result is None:
                raise GuestError("failed to open file: No such file or directory")
            return 1 if path.endswith("result.json") else 2
        if command == "guest-file-read":
            data = self.guest.result if (arguments or {})["handle"] == 1 else b"a log"
            return {"count": len(data or b""), "buf-b64": base64.b64encode(data or b"").decode(), "eof": True}
        return {}

    async def destroy(self) -> None:
        self.end("destroyed")


class StubHypervisor:
    """Makes machines of a guest."""

    def __init__(self, guest: Guest, directory: Path) -> None:
        self.accelerator = Accelerator.KVM
        self.guest = guest
        self.directory = directory
        self.machines: list[StubMachine] = []

    async def create(self, spec: MachineSpec) -> StubMachine:
        self.guest.started.append(spec)
        self.machines.append(StubMachine(self.guest, spec, self.directory / spec.machine_id))
        return self.machines[-1]


class Builder:
    """One build, of a plan that is made once."""

    def __init__(self, plan: BuildPlan, directory: Path) -> None:
        self.plan = plan
        self.guest = Guest()
        self.catalogue = ImageCatalogue(directory / "cache")
        self.reports = directory / "reports"
        self.stages: list[tuple[str, float]] = []
        (directory / "machines").mkdir()
        self.hypervisor = StubHypervisor(self.guest, directory / "machines")
        self.scratch = directory / "media"
        self.scratch.mkdir()

    async def run(self, limits: BuildLimits = LIMITS) -> Image:
        media = write_media(self.plan, self.scratch)
        return await build_windows(
            self.plan,
            cast("LibvirtHypervisor", self.hypervisor),
            self.catalogue,
            media,
            name="win11",
            recipe="recipe",
            reports=self.reports,
            limits=limits,
            memory_mib=4096,
            vcpu_count=2,
            progress=lambda stage, done: self.stages.append((stage, done)),
        )

    async def fails(self, limits: BuildLimits = LIMITS) -> str:
        """Run the build; return its error. Nothing may be left but the reports."""
        with pytest.raises(ImageError) as raised:
            await self.run(limits)
        assert self.catalogue.list() == ()
        assert list(self.catalogue.root.iterdir()) == []
        assert all(machine.lost.is_set() for machine in self.hypervisor.machines)
        assert str(raised.value).endswith(f"; the last picture and the logs are in {self.reports}")
        assert (self.reports / "last.png").exists()
        assert any(self.reports.glob("*-console.log"))
        return str(raised.value)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> BuildPlan:
    directory = tmp_path_factory.mktemp("iso")
    options = WindowsOptions(
        iso=make_windows_iso(directory / "windows.iso", (MediumEdition(),)),
        virtio_win=make_virtio_iso(directory / "virtio-win.iso", virtio_files("w11")),
        screen_width_px=SCREEN[0],
        screen_height_px=SCREEN[1],
    )
    return plan_build(options, directory=directory)


@pytest.fixture
def builder(plan: BuildPlan, tmp_path: Path) -> Builder:
    return Builder(plan, tmp_path)


async def test_the_image_has_the_disk_firmware_and_tpm_of_the_first_start(builder: Builder) -> None:
    image = await builder.run()
    assert [spec.machine_id for spec in builder.guest.started] == ["install", "first-start", "second-start"]
    disk = builder.catalogue.disk_image("win11")
    assert (disk.os.value, disk.hardware.value, disk.firmware.value) == ("windows", "windows", "uefi")
    assert disk.provides == {"powershell"}
    assert not disk.has_guestd
    assert disk.firmware_vars is not None
    assert disk.firmware_vars.read_text() == "vars of first-start"
    assert disk.tpm_state is not None
    assert disk.tpm_state.read_text() == "tpm of first-start"
    assert disk.disk.parent == disk.firmware_vars.parent
    assert disk.tpm_state.stat().st_mode & 0o077 == 0, "it may hold secrets of the guest"
    assert (image.screen_width_px, image.screen_height_px) == SCREEN
    assert image.source["edition"] == "Windows 11 Enterprise Evaluation"
    assert image.source["defender"] == "stopped"
    found = builder.catalogue.find_built("win11", "recipe")
    assert found is not None
    assert found.digest == image.digest
    assert builder.catalogue.find_built("win11", "another") is None


async def test_only_the_installation_has_the_discs(builder: Builder) -> None:
    await builder.run()
    install, *starts = builder.guest.started
    assert [drive.path.name for drive in install.image.cdroms] == ["boot.qcow2", "answers.iso"]
    assert install.image.firmware_vars is None
    for spec in starts:
        assert spec.image.drives == ()
        assert spec.image.firmware_vars is not None
        assert spec.image.tpm_state is not None


async def test_an_evaluation_expires_90_days_after_its_installation(builder: Builder) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    image = await builder.run()
    assert image.expire_time is not None
    assert before <= image.expire_time - timedelta(days=90) <= datetime.now(UTC)
    assert builder.catalogue.disk_image("win11").expire_time == image.expire_time


async def test_each_phase_has_a_picture_and_progress_never_falls(builder: Builder) -> None:
    await builder.run()
    names = {path.name for path in builder.reports.iterdir()}
    assert {
        "2-copying.png", "3-devices.png", "4-first-logon.png", "5-shutting-down.png", "6-desktop.png",
        "7-second-start.png", "install-console.log", "install.log",
    } <= names  # fmt: skip
    assert "last.png" not in names
    with PillowImage.open(builder.reports / "6-desktop.png") as picture:
        assert picture.size == SCREEN
    fractions = [done for _, done in builder.stages]
    assert fractions == sorted(fractions)
    assert fractions[-1] < 1.0


async def test_reports_of_an_earlier_build_are_removed(builder: Builder) -> None:
    builder.reports.mkdir()
    (builder.reports / "last.png").touch()
    await builder.run()
    assert not (builder.reports / "last.png").exists()


async def test_an_installation_that_ends_soon_after_its_last_lines_is_complete(builder: Builder) -> None:
    lines = CONSOLE.splitlines(keepends=True)
    builder.guest.console, builder.guest.last_lines = b"".join(lines[:2]), b"".join(lines[2:])
    await builder.run()
    assert "shutting down" in [stage for stage, _ in builder.stages]


async def test_an_installation_that_does_not_change_is_reported_with_its_phase(builder: Builder) -> None:
    builder.guest.console, builder.guest.powers_off = CONSOLE[:24], False
    message = await builder.fails(replace(LIMITS, stall=SOON))
    assert "installation: nothing changed for 0 s (copying Windows); the last picture shows" in message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda g: setattr(g, "end_reason", "its QEMU ended: crashed"), "the machine ended while shutting down"),
        (lambda g: setattr(g, "console", CONSOLE[:24]), "the guest shut down while copying Windows"),
        (lambda g: setattr(g, "result", None), "first logon: not finished; see install.log"),
        (lambda g: setattr(g, "result", b"{}"), "first logon: its result cannot be read"),
        (
            lambda g: setattr(g, "result", json.dumps({"failures": ["drivers: no disc", "agent: 5"]}).encode()),
            "first logon: 2 steps failed (drivers: no disc; agent: 5); fix these and build again",
        ),
    ],
)
async def test_a_failed_installation_has_a_cause(
    builder: Builder, change: Callable[[Guest], None], problem: str
) -> None:
    change(builder.guest)
    assert problem in await builder.fails()


@pytest.mark.parametrize(
    ("change", "limits", "problem"),
    [
        (
            lambda g: setattr(g, "agent_answers", False),
            replace(LIMITS, boot=SOON),
            "first-start: the guest agent did not answer within 0 s",
        ),
        (
            lambda g: setattr(g, "screen", (800, 600)),
            replace(LIMITS, boot=SOON),
            "screen: 800x600, not 640x480; choose a common size",
        ),
        (
            lambda g: setattr(g, "repaints", True),
            replace(LIMITS, still=timedelta(seconds=10), unrest=timedelta(seconds=-9.9)),
            "screen: still moved after",
        ),
        (
            lambda g: setattr(g, "obeys_shutdown", False),
            replace(LIMITS, shutdown=SOON),
            "first start: the guest did not shut down within 0 s",
        ),
    ],
)
async def test_a_result_that_does_not_work_for_agents_is_not_published(
    builder: Builder, change: Callable[[Guest], None], limits: BuildLimits, problem: str
) -> None:
    change(builder.guest)
    assert problem in await builder.fails(limits)


async def test_a_cancelled_build_leaves_nothing(builder: Builder) -> None:
    builder.guest.powers_off = False
    running = asyncio.create_task(builder.run())
    while not builder.hypervisor.machines or builder.hypervisor.machines[0].looks < 3:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert builder.hypervisor.machines[0].lost.is_set()
    assert list(builder.catalogue.root.iterdir()) == []


def test_limits_depend_on_the_accelerator_and_a_clock_is_not_movement() -> None:
    slow = LIMITS.under(Accelerator.TCG)
    assert slow.stall > LIMITS.stall
    assert slow.boot > LIMITS.boot
    assert slow.still == LIMITS.still
    assert LIMITS.under(Accelerator.KVM) == LIMITS
    before = np.zeros((720, 1280, 3), np.uint8)
    clock, window = before.copy(), before.copy()
    clock[700:715, 1200:1260] = 255
    window[100:300, 100:300] = 255
    assert not build_module._differs(before, clock)
    assert build_module._differs(before, window)
    assert build_module._differs(before, before[:480])
