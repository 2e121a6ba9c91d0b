"""What one run of the stage `rl` leaves in its directory: `run.json`, how it ended, and `evaluations.jsonl`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.files import write_atomically
from trainer.learn.settings import Settings

_FILE = "run.json"
_EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScore:
    """The result of one episode of an evaluation."""

    task_id: str
    score: float | None
    """None if it is void."""
    guest_end_cause: str = ""
    """Cause if the agent ended its guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """One evaluation on the held-out tasks."""

    update: int
    temperature: float
    scores: list[HeldOutScore]
    env_steps: int = 0
    """Environment steps of training until then."""

    def add_to(self, directory: Path) -> None:
        with (directory / _EVALUATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


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
    return sorted({path.parent for name in (_FILE, _EVALUATIONS) for path in run.glob(f"*/{name}")})


def read_evaluations(directory: Path) -> list[HeldOutEvaluation]:
    path = directory / _EVALUATIONS
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return [
        HeldOutEvaluation(**{**line, "scores": [HeldOutScore(**score) for score in line["scores"]]}) for line in lines
    ]


def _write(directory: Path, record: Mapping[str, Any]) -> None:
    write_atomically(directory / _FILE, (json.dumps(record, indent=1) + "\n").encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
