"""Phases of an installation, from the lines that its scripts write to the serial port. Pure."""

import re
from dataclasses import dataclass
from enum import Enum

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


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationProgress:
    """How far an installation is."""

    phase: Phase
    stage: str
    """Text for the progress bar."""
    fraction: float
    """Finished share of the installation, in [0, 1]."""


def installation_progress(console: bytes, *, disk_bytes: int, expected_bytes: int) -> InstallationProgress:
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
    return InstallationProgress(phase=phase, stage=stage, fraction=fraction)


def _phase(lines: list[str]) -> Phase:
    if not lines:
        return Phase.STARTING
    if lines[-1] == FINISHED:
        return Phase.SHUTTING_DOWN
    if lines[-1] in {"windows-pe", "defender-disabled"}:
        return Phase.COPYING
    return Phase.DEVICES if lines[-1] == "specialize" else Phase.FIRST_LOGON
