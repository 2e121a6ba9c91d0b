"""The file of a recording: records with checksums, appended as the episode runs.

```text
ENVDREC1 | record | record | ... | END record | position of the END record, ENVDEND1
record:   kind (1 byte) | payload size | CRC-32 of kind, time and payload | Unix time | payload
```

A frame is a whole image or the tiles that differ from the frame before, compressed as for clients. There is no index
that a crash could damage: the records are the index. Reading ends at the first record that is cut or damaged, so a
torn write costs the records from there on. The last 16 bytes only make listings quick.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from envd.base.errors import EnvdError

MAGIC = b"ENVDREC1"
_END_MAGIC = b"ENVDEND1"
_HEAD = Struct("<BIId")
_TIME = Struct("<Bd")
_TRAILER = Struct("<Q8s")
#: A larger one is damage: a whole frame of the largest screen has 100 MB of pixels.
_MAX_PAYLOAD_BYTES = 256 << 20


class RecordingUnreadable(EnvdError, reason="RECORDING_UNREADABLE"):
    """A recording does not exist, or its file is damaged from the start."""


class Kind(IntEnum):
    """Kinds of records."""

    #: The episode, as JSON. First in a file, and again after a restart of the daemon.
    META = 1
    #: A line of JSON, then pixels.
    FRAME = 2
    #: A step, as JSON.
    STEP = 3
    #: The checkers' result, as JSON.
    SCORE = 4
    #: How the episode ended, as JSON. Last.
    END = 5
    #: The step and epoch that the episode was put back to, as JSON.
    ROLLBACK = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record."""

    kind: Kind
    time_s: float
    """Unix time."""
    payload: bytes
    position: int
    end: int
    """Position in the file after it."""

    def json(self) -> dict[str, Any]:
        """Return a payload of JSON. Raises: RecordingUnreadable: it is not an object."""
        return _parsed(self.payload)

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """Return the description and the pixels of a frame. Raises: RecordingUnreadable."""
        line, _, pixels = self.payload.partition(b"\n")
        return _parsed(line), pixels


def packed(kind: Kind, time_s: float, payload: bytes) -> bytes:
    return _HEAD.pack(kind, len(payload), _crc(kind, time_s, payload), time_s) + payload


def packed_json(kind: Kind, time_s: float, value: dict[str, Any]) -> bytes:
    return packed(kind, time_s, json.dumps(value, separators=(",", ":")).encode())


def trailer(end_record_at: int) -> bytes:
    """Return what follows the END record at a position."""
    return _TRAILER.pack(end_record_at, _END_MAGIC)


def read_records(file: BinaryIO, *, name: str) -> Iterator[Record]:
    """Yield the records up to the end, or to the first one that is cut or damaged.

    Raises:
        RecordingUnreadable: It is not a recording.
    """
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingUnreadable(f"recording {name}: not a recording; delete the file")
    while (record := _next(file)) is not None:
        yield record


def record_at(file: BinaryIO, position: int) -> Record | None:
    """Return the record at a position; None if it is cut or damaged."""
    file.seek(position)
    return _next(file)


def end_of(file: BinaryIO) -> Record | None:
    """Return the END record by means of the trailer; None if the recording is not complete."""
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER.size:
        return None
    file.seek(size - _TRAILER.size)
    position, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    if magic != _END_MAGIC or position >= size:
        return None
    record = record_at(file, position)
    return record if record is not None and record.kind is Kind.END else None


def open_file(path: Path) -> BinaryIO:
    """Open a recording for reading. Raises: RecordingUnreadable."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise RecordingUnreadable(
            f"recording {path.stem}: not in {path.parent}; it was not recorded, or dropped for newer ones"
        ) from None
    except OSError as error:
        raise RecordingUnreadable(f"recording {path.stem}: {path} cannot be read: {error.strerror}") from error


def _next(file: BinaryIO) -> Record | None:
    position = file.tell()
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    number, size, crc, time_s = _HEAD.unpack(head)
    if size > _MAX_PAYLOAD_BYTES or number not in Kind.__members__.values():
        return None
    payload = file.read(size)
    if len(payload) < size or _crc(number, time_s, payload) != crc:
        return None
    return Record(kind=Kind(number), time_s=time_s, payload=payload, position=position, end=file.tell())


def _crc(kind: int, time_s: float, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_TIME.pack(kind, time_s)))


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RecordingUnreadable(f"recording: a record is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordingUnreadable("recording: a record is not a JSON object")
    return value
