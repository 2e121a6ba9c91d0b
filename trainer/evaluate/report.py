"""An evaluation as one HTML page next to its results: rates, and every attempt turn by turn. Needs no network.

Texts of models and guests are hostile: the template escapes them, and the page's policy forbids scripts.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from pydantic import ValidationError

from trainer.evaluate.replay import FILE_NAME, Replay
from trainer.evaluate.results import Attempt, Results
from trainer.evaluate.summary import summarise


def write_report(results: Results, page: Path) -> None:
    """Write the page.

    Args:
        page: Path of the page; replays are relative to its directory.
    """
    shown = [(attempt, _read(page.parent, attempt)) for attempt in results.attempts]
    template = _environment().get_template("report.html.j2")
    html = template.render(
        run=results.run, summary=summarise(results), shown=shown, time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    )
    page.write_text(html, encoding="utf-8")


def _read(directory: Path, attempt: Attempt) -> Replay | None:
    """Return an attempt's replay; None if none was kept, or it is unreadable."""
    if not attempt.replay:
        return None
    try:
        return Replay.model_validate_json((directory / attempt.replay / FILE_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer.evaluate"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"percent": lambda share: f"{100 * share:.1f} %", "seconds": lambda time: f"{time:.1f} s"}
    environment.filters.update(filters)
    return environment
