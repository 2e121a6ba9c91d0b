"""A recording as JSON lines for programs: the episode, then its steps, each with the screen after it."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envd.episodes.recording.library import Recording
from envd.episodes.recording.video import picture_of


def write_steps(recording: Recording, path: Path, *, progress: Callable[[float], None]) -> None:
    """Write a recording. `screen` is a PNG of the guest's size, with the pointer, as a data URI.

    Raises:
        RecordingUnreadable: It has no frame, or one is damaged.
    """
    score = {"score": None, **(recording.score or {})}
    with path.open("w", encoding="utf-8") as file:
        _write(file, {**recording.meta, **score, "end": recording.end, "screen": _screen(recording, 0)})
        for count, step in enumerate(recording.steps, 1):
            _write(file, {**step, "screen": _screen(recording, recording.after(step))})
            progress(count / len(recording.steps))


def _write(file: Any, value: dict[str, Any]) -> None:
    file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _screen(recording: Recording, index: int) -> str:
    png = io.BytesIO()
    image = recording.image(index)
    picture_of(image, recording.frames[index].pointer_px).save(png, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
