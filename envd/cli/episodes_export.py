"""`envd episodes export`: write a recorded episode as a video, a page or JSON lines. Needs no daemon."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from cuaenv.cli.terminal import Json, emit_json, out, progress
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.options import config_options
from envd.episodes.recording.library import Library
from envd.episodes.recording.page import write_page
from envd.episodes.recording.steps import write_steps
from envd.episodes.recording.video import export_video


@command(config_options())
def export(
    settings: Config,
    *,
    episode_id: Annotated[str, typer.Argument(metavar="EPISODE", help="Id of a recorded episode.")],
    export_format: Annotated[
        Literal["mp4", "webm", "gif", "html", "jsonl"],
        typer.Option("--format", help="A video, or the screen after each step: one page, or JSON lines."),
    ] = "mp4",
    to: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="The file; by default EPISODE.FORMAT here.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of recordings; by default recording.directory.")
    ] = None,
    max_pause: Annotated[float, typer.Option(metavar="S", min=0.04, max=3600, help="Cut longer pauses.")] = 2.0,
    speed: Annotated[float, typer.Option(metavar="X", min=0.1, max=100, help="2 for twice as fast.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Write a recorded episode as a video, a page or JSON lines, on the host that has the recordings."""
    source = directory or settings.recording.directory
    if source is None:
        raise ConfigError("export: no directory of recordings; pass --directory, or --config with recording.directory")
    path = to or Path(f"{episode_id}.{export_format}")
    recording = Library(source).read(episode_id)
    try:
        with progress(f"exporting {episode_id}") as report:
            written = partial(report, "written")
            if export_format == "html":
                write_page(recording, path, progress=written)
            elif export_format == "jsonl":
                write_steps(recording, path, progress=written)
            else:
                export_video(recording, path, export_format, max_pause_s=max_pause, speed=speed, progress=written)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror or error}") from error
    count, size_bytes = len(recording.frames), path.stat().st_size
    if as_json:
        emit_json({"path": str(path), "frames": count, "bytes": size_bytes})
    else:
        out.print(f"wrote {path}: {count} frames, {size_bytes / 1e3:.0f} kB", markup=False, soft_wrap=True)
