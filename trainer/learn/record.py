"""The record `run.json` of one run of the stage `rl`: what it was, and how it ended."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.learn.settings import Settings

_FILE = "run.json"


@contextmanager
def recorded(directory: Path, settings: Settings, *, seed: int) -> Iterator[None]:
    """Write the record now, with status `running`, and again when the block ends."""
    record: dict[str, Any] = {
        "ablation": settings.ablation,
        "arm": settings.arm,
        "seed": seed,
        "started": _now(),
        "status": "running",
        "error": "",
        "settings": settings.model_dump(mode="json", exclude_unset=True),
    }
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory, record)
    try:
        yield
    except BaseException as error:
        is_stopped = isinstance(error, KeyboardInterrupt)
        record |= {"status": "interrupted" if is_stopped else "failed", "error": "" if is_stopped else str(error)}
        raise
    else:
        record["status"] = "ended"
    finally:
        _write(directory, {**record, "ended": _now()})


def read_record(directory: Path) -> Mapping[str, Any]:
    """Return the record of a run; without one, that of a plain run of unknown status."""
    path = directory / _FILE
    plain = {"ablation": "", "arm": "", "seed": 0, "status": "unknown", "error": "", "settings": {}}
    return {**plain, **json.loads(path.read_text(encoding="utf-8"))} if path.exists() else plain


def run_directories(run: Path) -> list[Path]:
    """Return the directories of the stage `rl` in a run."""
    return sorted({path.parent for name in (_FILE, "evaluations.jsonl") for path in run.glob(f"*/{name}")})


def _write(directory: Path, record: Mapping[str, Any]) -> None:
    new = directory / f"{_FILE}.new"
    new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    new.replace(directory / _FILE)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
