"""List and read recordings. Blocks: call from a thread."""

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cuaenv.frames import FrameMismatch, TiledImage
from cuaenv.region import Region
from envd.episodes.recording.records import Kind, RecordingUnreadable, end_of, open_file, read_records, record_at
from envd.episodes.recording.writer import SUFFIX

_EPISODE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Recordings that stay open between two requests: one replay asks for hundreds of frames.
_MAX_OPEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSummary:
    """A recording in a list."""

    meta: dict[str, Any]
    end: dict[str, Any] | None
    """None if the episode still runs, or its recording ended early."""
    time_s: float
    """Unix time of its last write."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFrame:
    """One frame. Its pixels stay in the file."""

    time_s: float
    head: dict[str, Any]
    position: int
    """Position of its record in the file."""

    @property
    def is_key(self) -> bool:
        """Whether it is a whole image."""
        return bool(self.head.get("key"))

    @property
    def pointer_px(self) -> tuple[int, int] | None:
        """The pointer's position; None if the guest draws it."""
        at = self.head.get("pointer")
        return None if at is None else (int(at[0]), int(at[1]))


class Recording:
    """A recording that was read; its frames' pixels, which may be gigabytes, are read and decoded on demand."""

    def __init__(self, path: Path) -> None:
        """Read a file, as far as it is undamaged. Raises: RecordingUnreadable."""
        self.name = path.stem
        self._path = path
        self.meta: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.score: dict[str, Any] | None = None
        self.steps: list[dict[str, Any]] = []
        self.frames: list[RecordedFrame] = []
        self._image: tuple[int, TiledImage] | None = None
        with open_file(path) as file:
            for record in read_records(file, name=self.name):
                match record.kind:
                    case Kind.META:
                        self.meta = self.meta or record.json()
                    case Kind.FRAME:
                        head, _ = record.frame()
                        self.frames.append(RecordedFrame(time_s=record.time_s, head=head, position=record.position))
                    case Kind.STEP:
                        self.steps.append({**record.json(), "time": record.time_s})
                    case Kind.ROLLBACK:
                        self._roll_back(**record.json())
                    case Kind.SCORE:
                        self.score = record.json()
                    case Kind.END:
                        self.end = record.json()
        if not self.meta:
            raise RecordingUnreadable(f"recording {self.name}: damaged from the start; delete the file")

    def _roll_back(self, *, step_count: int, state_time: float = 0.0, **_more: Any) -> None:
        """Mark the steps after a state. A person's step has the index of the agent's next one."""
        self.score = None
        for step in self.steps:
            is_persons = step["source"] == "human" and step["index"] == step_count and step["time"] <= state_time
            is_after = step["index"] >= step_count and not is_persons
            step["rolled_back"] = step.get("rolled_back", False) or is_after

    def image(self, index: int) -> TiledImage:
        """Return a frame's pixels. Quick for the frame after the last one asked for.

        Raises:
            RecordingUnreadable: There is no such frame, it is damaged, or the file was dropped.
        """
        if not 0 <= index < len(self.frames):
            raise RecordingUnreadable(
                f"recording {self.name}: frame {index} not found; it has {len(self.frames)} frames"
            )
        first = next((i for i in range(index, -1, -1) if self.frames[i].is_key), None)
        if first is None:
            raise RecordingUnreadable(f"recording {self.name}: frame {index} has no whole image before it")
        at, image = self._image or (-1, None)
        if image is None or not first <= at <= index:
            at, image = first - 1, None
        with open_file(self._path) as file:
            for i in range(at + 1, index + 1):
                image = self._next_image(file, self.frames[i], image)
        if image is None:
            raise AssertionError("the loop starts at a whole image")
        self._image = (index, image)
        return image

    def after(self, step: dict[str, Any]) -> int:
        """Return the index of the frame that the screen showed after a step."""
        return max(0, bisect_right(self.frames, step["time"], key=lambda frame: frame.time_s) - 1)

    def images(self) -> Iterator[tuple[RecordedFrame, TiledImage]]:
        """Yield every frame with its pixels. Raises: RecordingUnreadable."""
        for index, frame in enumerate(self.frames):
            yield frame, self.image(index)

    def _next_image(self, file: BinaryIO, frame: RecordedFrame, before: TiledImage | None) -> TiledImage:
        head = frame.head
        if (record := record_at(file, frame.position)) is None:
            raise RecordingUnreadable(f"recording {self.name}: a frame is damaged")
        _, pixels = record.frame()
        try:
            if frame.is_key:
                return TiledImage.unpack(
                    pixels, width_px=head["width"], height_px=head["height"], image_id=head["image"]
                )
            if before is None:
                raise AssertionError("a change follows a whole image")
            if "tiles" not in head:
                return before
            tiles = [Region(x_px=x, y_px=y, width_px=w, height_px=h) for x, y, w, h in head["tiles"]]
            return before.patched(tiles, pixels, image_id=head["image"])
        except (FrameMismatch, KeyError, TypeError, ValueError) as error:
            raise RecordingUnreadable(f"recording {self.name}: a frame is damaged: {error}") from error


class Library:
    """All recordings of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[tuple[str, int, int], Recording] = OrderedDict()

    def summaries(self) -> list[RecordingSummary]:
        """Return all recordings, the newest first; files that are not readable are left out."""
        found: list[RecordingSummary] = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            # Unreadable, or dropped by now.
            with suppress(RecordingUnreadable, OSError):
                found.append(_summary(path))
        return sorted(found, key=lambda summary: -summary.time_s)

    def read(self, episode_id: str) -> Recording:
        """Return a recording. Raises: RecordingUnreadable."""
        if not _EPISODE_ID.fullmatch(episode_id):
            raise RecordingUnreadable(f"recording {episode_id!r}: not found; an episode's id is expected")
        path = self._directory / f"{episode_id}{SUFFIX}"
        try:
            stat = path.stat()
        except OSError:
            with open_file(path):
                raise AssertionError("the file appeared") from None
        key = (episode_id, stat.st_size, stat.st_mtime_ns)
        if key not in self._open:
            self._open[key] = Recording(path)
        self._open.move_to_end(key)
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return self._open[key]


def _summary(path: Path) -> RecordingSummary:
    with open_file(path) as file:
        first = next(read_records(file, name=path.stem), None)
        if first is None or first.kind is not Kind.META:
            raise RecordingUnreadable(f"recording {path.stem}: damaged from the start; delete the file")
        end = end_of(file)
    stat = path.stat()
    return RecordingSummary(
        meta=first.json(), end=None if end is None else end.json(), time_s=stat.st_mtime, size_bytes=stat.st_size
    )
