"""Turn a recording into a video: MP4 (H.264), WebM (VP9) or GIF. Pauses are shortened, the pointer is drawn."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

import numpy as np
from PIL import Image, ImageDraw

from cuaenv.frames import TiledImage
from envd.base.errors import ConfigError
from envd.episodes.recording.library import Recording
from envd.episodes.recording.records import RecordingUnreadable

_MIN_FRAME_S = 0.04
_LAST_FRAME_S = 2.0
_GIF_WIDTH_PX = 800
#: An arrow with its tip at (0, 0).
_ARROW = ((0, 0), (0, 17), (4, 13), (7, 20), (10, 19), (7, 12), (12, 12))
VideoFormat = Literal["mp4", "webm", "gif"]
# MP4 without B-frames: with them the file claims a shorter duration than its last frame's time.
_CODECS = {
    "mp4": ("libx264", {"crf": "23", "preset": "veryfast", "bf": "0"}),
    "webm": ("libvpx-vp9", {"crf": "34", "b": "0", "deadline": "realtime", "cpu-used": "8"}),
}


def export_video(
    recording: Recording,
    path: Path,
    video_format: VideoFormat,
    *,
    max_pause_s: float,
    speed: float = 1.0,
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Write a recording as a video. On failure there is no file.

    Args:
        path: The file, which is replaced.
        max_pause_s: A frame is shown for at most this long: agents think for long.
        speed: 2 for twice as fast.

    Raises:
        RecordingUnreadable: It has no frames, or a frame is damaged.
        ConfigError: The format needs a package that is not installed.
    """
    if not recording.frames:
        raise RecordingUnreadable(f"recording {recording.name}: it has no frames")
    durations_s = shown_for_s([frame.time_s for frame in recording.frames], max_pause_s=max_pause_s, speed=speed)
    partial = path.with_name(f".{path.name}.part")
    try:
        if video_format == "gif":
            _write_gif(_pictures(recording, progress), durations_s, partial)
        else:
            _write_video(_pictures(recording, progress), durations_s, partial, video_format)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def shown_for_s(times_s: list[float], *, max_pause_s: float, speed: float) -> list[float]:
    """Return for how long each frame is shown. Pure."""
    pauses_s = [later - time_s for time_s, later in pairwise(times_s)]
    shortened = [max(_MIN_FRAME_S, min(pause_s, max_pause_s) / speed) for pause_s in pauses_s]
    return [*shortened, _LAST_FRAME_S]


def _pictures(recording: Recording, progress: Callable[[float], None]) -> Iterator[Image.Image]:
    """Yield every frame with its pointer, in the size of the first one with even sides."""
    size_px: tuple[int, int] | None = None
    for index, (frame, image) in enumerate(recording.images()):
        picture = picture_of(image, frame.pointer_px)
        size_px = size_px or (picture.width // 2 * 2, picture.height // 2 * 2)
        yield picture if picture.size == size_px else picture.resize(size_px)
        progress((index + 1) / len(recording.frames))


def picture_of(image: TiledImage, pointer_px: tuple[int, int] | None) -> Image.Image:
    picture = Image.fromarray(image.rgb_HWC())
    if pointer_px is not None:
        picture = picture.copy()
        x, y = pointer_px
        ImageDraw.Draw(picture).polygon([(x + dx, y + dy) for dx, dy in _ARROW], fill="white", outline="black")
    return picture


def _write_gif(pictures: Iterator[Image.Image], durations_s: list[float], path: Path) -> None:
    frames = []
    for picture in pictures:
        scaled = picture
        if picture.width > _GIF_WIDTH_PX:
            scaled = picture.resize((_GIF_WIDTH_PX, round(picture.height * _GIF_WIDTH_PX / picture.width)))
        frames.append(scaled.quantize(256, Image.Quantize.FASTOCTREE))
    # Pillow merges equal frames, and then expects a duration for each of those that were passed.
    frames[0].save(
        path,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=[round(duration_s * 1000) for duration_s in durations_s],
        loop=0,
    )


def _write_video(pictures: Iterator[Image.Image], durations_s: list[float], path: Path, video_format: str) -> None:
    try:
        # Optional, and not needed for GIF.
        import av  # noqa: PLC0415
        from av.video.stream import VideoStream  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"--format {video_format}: the package av is missing; install envd-trainer[video], or export --format gif"
        ) from None
    codec, options = _CODECS[video_format]
    time_base = Fraction(1, 1000)
    with av.open(str(path), "w", format=video_format) as container:
        at_s = 0.0
        stream: VideoStream | None = None
        for picture, duration_s in zip(pictures, durations_s, strict=True):
            if stream is None:
                stream = cast(VideoStream, container.add_stream(codec, rate=25, options=options))
                stream.width, stream.height, stream.pix_fmt = picture.width, picture.height, "yuv420p"
                stream.codec_context.time_base = time_base
            frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
            frame.pts, frame.time_base = round(at_s * 1000), time_base
            container.mux(stream.encode(frame))
            at_s += duration_s
        if stream is None:
            raise AssertionError("the recording has frames")
        # Players show a frame until the next one: the last one is repeated at its end.
        frame.pts = round(at_s * 1000)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
