"""Builds an image of Windows: installs it in a machine, proves the result, and seals it with its firmware and TPM.

The machine is the one that pools fork. Each start is of a disk that was sealed before, and each seal is of a machine
that shut itself down, so what is published has been started twice. A failed or interrupted build leaves nothing in the
catalogue; its pictures and logs stay in the report directory.
"""

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image as PillowImage

from envd.base.aio import race
from envd.base.errors import EnvdError, GuestUnresponsive, ImageError, MachineLost
from envd.desktop.agent import GuestAgent
from envd.hypervisor.machine import Accelerator, DiskImage, Firmware, GuestOs, Hardware, MachineSpec
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.hypervisor.qemu.machine import LibvirtMachine
from envd.images.catalogue import Image, ImageCatalogue, file_sha256
from envd.images.windows.media import Progress
from envd.images.windows.plan import BuildPlan, qemu_img

Pixels = npt.NDArray[np.uint8]

#: Files that `first-logon.ps1` leaves in the guest.
_RESULT_FILE = r"C:\ProgramData\envd\result.json"
_INSTALL_LOG = r"C:\ProgramData\envd\install.log"
#: Pixels that may differ on a screen at rest, as a share: a clock's digits, or a blinking caret.
_STILL_SHARE = 0.002
_PING_TIMEOUT_S = 5.0
#: Emulated guests take about this many times as long.
_TCG_FACTOR = 8


#: Complete lines only: the rest of one may still be on its way. A terminal may add a second carriage return.
_LINE = re.compile(rb"envd-setup: ([ -~]{1,80}?)[ \r]*\n")
#: Steps of `first-logon.ps1` before the programs.
_LOGON_STEPS = ("publishers", "drivers", "agent", "settings", "defender", "clean-up", "finished")
FINISHED = "finished"


class Phase(Enum):
    """A phase of an installation, in order. The value is its name in file names of pictures."""

    #: Firmware and the boot loader of the medium.
    STARTING = "starting"
    #: Windows PE: Setup partitions the disk and copies the system.
    COPYING = "copying"
    #: The new system installs its devices and restarts.
    DEVICES = "devices"
    #: The first logon: drivers, agent, settings and programs.
    FIRST_LOGON = "first-logon"
    #: The first logon is complete, and the machine shuts down.
    SHUTTING_DOWN = "shutting-down"


_STAGES = {
    Phase.STARTING: "starting Windows Setup",
    Phase.COPYING: "copying Windows",
    Phase.DEVICES: "installing devices",
    Phase.SHUTTING_DOWN: "shutting down",
}
#: Share of the installation that is done when a phase begins.
_BEGINS = {
    Phase.STARTING: 0.0,
    Phase.COPYING: 0.03,
    Phase.DEVICES: 0.5,
    Phase.FIRST_LOGON: 0.7,
    Phase.SHUTTING_DOWN: 0.98,
}


def installation_progress(console: bytes, *, disk_bytes: int, expected_bytes: int) -> tuple[Phase, str, float]:
    """Return the phase of an installation, its text for the progress bar, and the share that is finished, in [0, 1]."""
    lines = [match.decode() for match in _LINE.findall(console)]
    phase = _phase(lines)
    fraction = _BEGINS[phase]
    stage = _STAGES.get(phase, "")
    if phase is Phase.COPYING:
        copied = min(1.0, disk_bytes / max(1, expected_bytes))
        fraction += (_BEGINS[Phase.DEVICES] - fraction) * copied
    elif phase is Phase.FIRST_LOGON:
        step = lines[-1]
        stage = f"first logon: {step}"
        done = _LOGON_STEPS.index(step) if step in _LOGON_STEPS else _LOGON_STEPS.index("clean-up")
        fraction += (_BEGINS[Phase.SHUTTING_DOWN] - fraction) * done / len(_LOGON_STEPS)
    return phase, stage, fraction


def _phase(lines: list[str]) -> Phase:
    if not lines:
        return Phase.STARTING
    if lines[-1] == FINISHED:
        return Phase.SHUTTING_DOWN
    if lines[-1] in {"windows-pe", "defender-disabled"}:
        return Phase.COPYING
    return Phase.DEVICES if lines[-1] == "specialize" else Phase.FIRST_LOGON


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """Time limits of a build. Under TCG all but `still` and `watch_interval_s` are multiplied."""

    stall: timedelta = timedelta(minutes=15)
    """Longest time in which an installation may show no change."""
    boot: timedelta = timedelta(minutes=10)
    """Longest time until the guest agent answers after a start, and until the screen has its size."""
    shutdown: timedelta = timedelta(minutes=5)
    """Longest time for a shutdown."""
    still: timedelta = timedelta(minutes=5)
    """Time in which nothing on the screen may move."""
    unrest: timedelta = timedelta(minutes=30)
    """Longest time until the screen is still for that time."""
    watch_interval_s: float = 2.0
    """Interval between observations of a machine."""

    def under(self, accelerator: Accelerator) -> "BuildLimits":
        if accelerator is not Accelerator.TCG:
            return self
        return BuildLimits(
            stall=self.stall * _TCG_FACTOR,
            boot=self.boot * _TCG_FACTOR,
            shutdown=self.shutdown * _TCG_FACTOR,
            still=self.still,
            unrest=self.unrest * _TCG_FACTOR,
        )


class WindowsBuild:
    """One build. `run` leaves the sealed disk, UEFI variables and TPM state in the directory."""

    def __init__(
        self,
        plan: BuildPlan,
        hypervisor: LibvirtHypervisor,
        *,
        directory: Path,
        reports: Path,
        limits: BuildLimits,
        memory_mib: int,
        vcpu_count: int,
        progress: Progress,
    ) -> None:
        """Create a build.

        Args:
            directory: Where the disk is sealed.
            reports: Where pictures and logs are kept; emptied first.
            limits: Time limits, already those of the accelerator.
        """
        self._plan = plan
        self._hypervisor = hypervisor
        self._directory = directory
        self._reports = reports
        self._limits = limits
        self._memory_mib = memory_mib
        self._vcpu_count = vcpu_count
        self._progress = progress
        self._picture: Pixels | None = None
        self.defender = ""
        """Status of Microsoft Defender's service at the end of the first logon, such as `Stopped`."""

    async def run(self, media: DiskImage) -> None:
        """Install, prove and seal.

        Raises:
            ImageError: It failed; the message names the phase, the remedy and the reports.
        """
        shutil.rmtree(self._reports, ignore_errors=True)
        self._reports.mkdir(parents=True)
        try:
            await self._in_machine("install", media, self._install)
            self._progress("first start", 0.75)
            await self._in_machine("first-start", self._sealed(), self._prove)
            self._progress("second start", 0.93)
            await self._in_machine("second-start", self._sealed(), self._start_again)
        except EnvdError as error:
            raise ImageError(f"{error}; the last picture and the logs are in {self._reports}") from error

    def _sealed(self) -> DiskImage:
        """Return the disk that was sealed last, as machines of a pool will boot it."""
        return DiskImage(
            name="windows",
            digest="",
            disk=self._directory / "disk.qcow2",
            os=GuestOs.WINDOWS,
            hardware=Hardware.WINDOWS,
            firmware=Firmware.UEFI,
            has_guestd=False,
            firmware_vars=self._directory / "vars.fd",
            tpm_state=self._directory / "tpm",
        )

    async def _in_machine(self, name: str, image: DiskImage, work: Callable[[LibvirtMachine], Awaitable[None]]) -> None:
        options = self._plan.options
        spec = MachineSpec(
            machine_id=name,
            image=image,
            memory_mib=self._memory_mib,
            vcpu_count=self._vcpu_count,
            screen_width_px=options.screen_width_px,
            screen_height_px=options.screen_height_px,
        )
        machine = await self._hypervisor.create(spec)
        try:
            await work(machine)
        except BaseException:
            # An ended machine has no screen; then the last picture taken is kept.
            with suppress(EnvdError):
                self._picture = await machine.screendump()
            if self._picture is not None:
                self._keep_picture("last", self._picture)
            raise
        finally:
            with suppress(OSError):
                shutil.copyfile(machine.files.console_log, self._reports / f"{name}-console.log")
            await machine.destroy()

    async def _install(self, machine: LibvirtMachine) -> None:
        """Follow an installation until its machine shuts down, then seal the disk."""
        loop = asyncio.get_running_loop()
        unchanged_since_s, fingerprint = loop.time(), b""
        while True:
            # Before the files are read, so that they are complete when it has ended.
            has_ended = machine.lost.is_set()
            console = machine.files.console_log.read_bytes() if machine.files.console_log.exists() else b""
            disk_bytes = machine.files.disk.stat().st_blocks * 512
            size_bytes = self._plan.edition.size_bytes
            phase, stage, fraction = installation_progress(console, disk_bytes=disk_bytes, expected_bytes=size_bytes)
            self._progress(stage, 0.7 * fraction)
            if has_ended:
                break
            with suppress(MachineLost):
                picture = await machine.screendump()
                self._keep_picture(f"{list(Phase).index(phase) + 1}-{phase.value}", picture)
                latest = picture.tobytes() + disk_bytes.to_bytes(8, "little") + len(console).to_bytes(8, "little")
                if latest != fingerprint:
                    unchanged_since_s, fingerprint = loop.time(), latest
            if loop.time() - unchanged_since_s > self._limits.stall.total_seconds():
                raise ImageError(
                    f"installation: nothing changed for {_in_words(self._limits.stall)} ({stage}); the last "
                    "picture shows what Setup waits for"
                )
            await race(machine.lost, timeout_s=self._limits.watch_interval_s)
        if "shut down" not in machine.lost_reason:
            raise ImageError(f"installation: the machine ended while {stage}: {machine.lost_reason}; try again")
        if phase not in {Phase.STARTING, Phase.FIRST_LOGON, Phase.SHUTTING_DOWN}:
            raise ImageError(f"installation: the guest shut down while {stage}; see the last picture")
        self._progress("sealing the disk", 0.71)
        await self._seal(machine)

    async def _prove(self, machine: LibvirtMachine) -> None:
        """Check a started system: agent, result of the installation, screen size and stillness; then seal it again."""
        agent = GuestAgent(machine)
        await self._wait_for_agent(machine, agent)
        await self._check_result(agent)
        self._progress("waiting for the desktop", 0.78)
        await self._wait_for_screen(machine)
        await self._wait_until_still(machine)
        self._keep_picture("6-desktop", await machine.screendump())
        self._progress("shutting down", 0.88)
        # The agent does not answer this command if it succeeds.
        with suppress(GuestUnresponsive, MachineLost):
            await machine.agent_command("guest-shutdown", {"mode": "powerdown"}, timeout_s=_PING_TIMEOUT_S)
        await race(machine.lost, timeout_s=self._limits.shutdown.total_seconds())
        if not machine.lost.is_set():
            raise ImageError(
                f"first start: the guest did not shut down within {_in_words(self._limits.shutdown)}; see the picture"
            )
        self._progress("sealing the disk", 0.89)
        await self._seal(machine)

    async def _start_again(self, machine: LibvirtMachine) -> None:
        """Check that what was sealed starts: this is what the first machine of a pool does."""
        await self._wait_for_agent(machine, GuestAgent(machine))
        await self._wait_for_screen(machine)
        self._keep_picture("7-second-start", await machine.screendump())

    async def _seal(self, machine: LibvirtMachine) -> None:
        """Copy the disk of an ended machine without its backing file, and its UEFI variables and TPM state."""
        disk = self._directory / "disk.qcow2"
        new = disk.with_suffix(".new")
        await asyncio.to_thread(qemu_img, "convert", "-O", "qcow2", str(machine.files.disk), str(new))
        new.rename(disk)
        shutil.copyfile(machine.files.firmware_vars, self._directory / "vars.fd")
        tpm = self._directory / "tpm"
        tpm.touch(mode=0o600)
        shutil.copyfile(machine.files.tpm_state, tpm)

    async def _wait_for_agent(self, machine: LibvirtMachine, agent: GuestAgent) -> None:
        try:
            async with asyncio.timeout(self._limits.boot.total_seconds()):
                while True:
                    try:
                        await agent.ping(timeout_s=_PING_TIMEOUT_S)
                    except GuestUnresponsive:
                        await race(machine.lost, timeout_s=self._limits.watch_interval_s)
                    else:
                        return
        except TimeoutError as error:
            raise ImageError(
                f"{machine.machine_id}: the guest agent did not answer within {_in_words(self._limits.boot)}; see the "
                "last picture, and use a current virtio-win ISO"
            ) from error

    async def _check_result(self, agent: GuestAgent) -> None:
        """Read what the first logon recorded. Raises: ImageError: a step failed, or it did not finish."""
        if log := await agent.read_file(_INSTALL_LOG):
            (self._reports / "install.log").write_bytes(log)
        data = await agent.read_file(_RESULT_FILE)
        if data is None:
            raise ImageError("first logon: not finished; see install.log")
        try:
            result = json.loads(data.decode("utf-8-sig"))
            failures, self.defender = result["failures"], str(result.get("defender", ""))
        except (ValueError, KeyError, TypeError) as error:
            raise ImageError(f"first logon: its result cannot be read ({error}); see install.log") from error
        if failures:
            listed = "; ".join(map(str, failures))
            raise ImageError(f"first logon: {len(failures)} steps failed ({listed}); fix these and build again")

    async def _wait_for_screen(self, machine: LibvirtMachine) -> None:
        wanted = (self._plan.options.screen_width_px, self._plan.options.screen_height_px)
        size = (0, 0)
        try:
            async with asyncio.timeout(self._limits.boot.total_seconds()):
                while size != wanted:
                    size = (await machine.screendump()).shape[1::-1]
                    if size != wanted:
                        await race(machine.lost, timeout_s=self._limits.watch_interval_s)
        except TimeoutError as error:
            raise ImageError(
                f"screen: {size[0]}x{size[1]}, not {wanted[0]}x{wanted[1]}; choose a common size, such as 1280x720"
            ) from error

    async def _wait_until_still(self, machine: LibvirtMachine) -> None:
        """Wait until the screen has not changed for the time asked for."""
        loop = asyncio.get_running_loop()
        begin_s = still_since_s = loop.time()
        before = await machine.screendump()
        while (still_s := loop.time() - still_since_s) < (wanted_s := self._limits.still.total_seconds()):
            self._progress("waiting for a still screen", 0.78 + 0.1 * still_s / wanted_s)
            if loop.time() - begin_s > self._limits.unrest.total_seconds() + wanted_s:
                raise ImageError(
                    f"screen: still moved after {_in_words(self._limits.unrest)}; close what moves with a program or "
                    "script (--program), or shorten --still"
                )
            await race(machine.lost, timeout_s=self._limits.watch_interval_s)
            now = await machine.screendump()
            if _differs(before, now):
                before, still_since_s = now, loop.time()

    def _keep_picture(self, name: str, rgb_HWC: Pixels) -> None:
        """Store a picture; a later one of the same name replaces it."""
        self._picture = rgb_HWC
        PillowImage.fromarray(rgb_HWC).save(self._reports / f"{name}.png", compress_level=1)


async def build_windows(
    plan: BuildPlan,
    hypervisor: LibvirtHypervisor,
    catalogue: ImageCatalogue,
    media: DiskImage,
    *,
    name: str,
    recipe: str,
    reports: Path,
    limits: BuildLimits,
    memory_mib: int,
    vcpu_count: int,
    progress: Progress,
) -> Image:
    """Build and publish an image.

    Args:
        hypervisor: Makes the machines; nothing else uses it.
        media: From `write_media`.
        recipe: From `BuildPlan.digest`.
        limits: Time limits with KVM.
    """
    with catalogue.staging(name) as directory:
        build = WindowsBuild(
            plan,
            hypervisor,
            directory=directory,
            reports=reports,
            limits=limits.under(hypervisor.accelerator),
            memory_mib=memory_mib,
            vcpu_count=vcpu_count,
            progress=progress,
        )
        await build.run(media)
        progress("hashing the disk", 0.98)
        disk_sha256 = await asyncio.to_thread(file_sha256, directory / "disk.qcow2")
        installed = datetime.now(UTC)
        evaluation = plan.edition.evaluation
        image = Image(
            name=name,
            # No two installations are equal, and templates are stored under this digest.
            digest=hashlib.sha256(f"{recipe} {disk_sha256}".encode()).hexdigest(),
            disk="disk.qcow2",
            disk_sha256=disk_sha256,
            os=GuestOs.WINDOWS.value,
            hardware=Hardware.WINDOWS.value,
            firmware=Firmware.UEFI.value,
            firmware_vars="vars.fd",
            tpm_state="tpm",
            has_guestd=False,
            provides=("powershell",),
            screen_width_px=plan.options.screen_width_px,
            screen_height_px=plan.options.screen_height_px,
            expires=(installed + evaluation).isoformat(timespec="seconds") if evaluation else "",
            source={
                "recipe": recipe,
                "edition": plan.edition.name,
                "build": str(plan.edition.build),
                "language": plan.options.language,
                "defender": build.defender.lower(),
                "iso": plan.options.iso.name,
                "drivers": plan.options.virtio_win.name,
            },
        )
        return catalogue.publish(directory, image)


def _differs(before: Pixels, now: Pixels) -> bool:
    """Whether more of the screen has changed than a clock or a caret changes."""
    if before.shape != now.shape:
        return True
    return float((before != now).any(axis=2).mean()) > _STILL_SHARE


def _in_words(span: timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
