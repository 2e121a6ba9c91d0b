"""Records of machines and captures on disk, next to their files, so that a later daemon can adopt them.

A machine of a libvirtd outlives the daemon that forked it. The daemon that adopts it needs its spec, and the template
or capture that backs its memory and disk, whose files must stay.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envd.base.errors import HypervisorError
from envd.hypervisor.machine import MachineSpec

FILE_NAME = "record.json"


class SnapshotRef(BaseModel):
    """Identifies a snapshot on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["template", "capture"]
    name: str
    """A template's key, or the name of a capture's directory."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    spec: MachineSpec
    # Named otherwise on disk, where earlier versions wrote it.
    backing: SnapshotRef = Field(validation_alias="stands_on", serialization_alias="stands_on")


class MachineRecord(_Record):
    """A fork."""


class CaptureRecord(_Record):
    """The captured state of a live machine."""

    digest: str
    disk_digest: str


def write_record(directory: Path, record: MachineRecord | CaptureRecord) -> None:
    """Write a record into the directory of its machine or capture. Raises: OSError."""
    (directory / FILE_NAME).write_text(record.model_dump_json(by_alias=True))


def read_machine(directory: Path) -> MachineRecord:
    """Read a machine's record. Raises: HypervisorError: it is missing or invalid."""
    try:
        return MachineRecord.model_validate_json((directory / FILE_NAME).read_bytes())
    except (OSError, ValidationError) as error:
        raise HypervisorError(f"machine record {directory / FILE_NAME}: cannot be read: {error}") from error


def read_capture(directory: Path) -> CaptureRecord:
    """Read a capture's record. Raises: HypervisorError: it is missing or invalid."""
    try:
        return CaptureRecord.model_validate_json((directory / FILE_NAME).read_bytes())
    except (OSError, ValidationError) as error:
        raise HypervisorError(f"capture record {directory / FILE_NAME}: cannot be read: {error}") from error
