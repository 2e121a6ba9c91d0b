"""One HTML page of a recording: the task, and each step with the screen after it. It runs no script."""

import base64
import html
import io
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

from envd.episodes.recording.library import Recording
from envd.episodes.recording.video import picture_of

_TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
_WEBP_QUALITY = 80


def write_page(recording: Recording, path: Path, *, progress: Callable[[float], None]) -> None:
    """Write a recording as one file that people can attach to a report.

    Raises:
        RecordingUnreadable: A frame is damaged.
    """
    sections = [_section("start", "", _screen(recording, 0))]
    for count, step in enumerate(recording.steps, 1):
        title = f"step {step['index'] + 1}: {', '.join(map(str, step['actions']))}"
        settled = "settled" if step.get("settled") else "not settled"
        detail = "; ".join((f"{step.get('ms', 0)} ms, {settled}", *map(str, step.get("unrecorded", ()))))
        sections.append(_section(title, detail, _screen(recording, recording.after(step))))
        progress(count / len(recording.steps))
    names = {"episode": html.escape(recording.name), "facts": _facts(recording), "sections": "\n".join(sections)}
    path.write_text(_TEMPLATE.substitute(names), encoding="utf-8")


def _facts(recording: Recording) -> str:
    facts: dict[str, Any] = {
        name: recording.meta[name] for name in ("task_id", "run", "pool") if recording.meta.get(name)
    }
    if recording.frames:
        facts["start"] = datetime.fromtimestamp(recording.frames[0].time_s, UTC).isoformat(timespec="seconds")
    facts |= {name: value for name, value in (recording.end or {}).items() if value and name != "checks"}
    if recording.score:
        facts["score"] = recording.score.get("score")
        facts |= {
            check["name"]: f"{check['score']:g}, {check['evidence']}" for check in recording.score.get("checks", ())
        }
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>" for name, value in facts.items())
    return f"<p>{html.escape(str(recording.meta.get('instruction', '')))}</p><dl>{rows}</dl>"


def _screen(recording: Recording, index: int) -> str:
    if not recording.frames:
        return ""
    file = io.BytesIO()
    picture_of(recording.image(index), recording.frames[index].pointer_px).save(file, "WEBP", quality=_WEBP_QUALITY)
    return f'<img alt="screen" src="data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _section(title: str, detail: str, screen: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(detail)}</p>{screen}</section>"
