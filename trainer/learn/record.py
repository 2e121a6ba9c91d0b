"""What a run leaves in its directory: `run.json`, how it ended; `evaluations.jsonl`; and `metrics.jsonl`.

Metrics also go to TensorBoard where it is installed, and to the terminal.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from cuaenv.cli.terminal import err
from trainer.files import write_atomically
from trainer.learn.settings import Settings

logger = logging.getLogger(__name__)
_FILE = "run.json"
_EVALUATIONS = "evaluations.jsonl"
_METRICS = "metrics.jsonl"
_SHOWN = (
    *(
        "loss",
        "right_replies",
        "success_frac",
        "entropy",
        "sampled_entropy",
        "parsed_frac",
        "void_frac",
        "rollout_s",
        "s",
        "steps_per_s",
    ),
    *("samples_per_s", "wait_s", "unseen/point", "unseen/three_colours", "unseen/read", "unseen/ticked"),
    *("plain/point", "plain/three_colours", "plain/read", "plain/ticked"),
)


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
    lines = _lines(directory / _EVALUATIONS)
    return [
        HeldOutEvaluation(**{**line, "scores": [HeldOutScore(**score) for score in line["scores"]]}) for line in lines
    ]


class MetricsLog:
    """Writes the metrics of one directory. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        """Append to `directory/metrics.jsonl`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._files = directory, ExitStack()
        self._file = self._files.enter_context((directory / _METRICS).open("a", encoding="utf-8"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @cached_property
    def _board(self) -> Any:
        """TensorBoard's writer, or None. It makes a file, and TensorBoard follows the last one of a directory.

        So it is made at the first write: of several processes of torchrun, one writes.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- optional
        except Exception as error:  # with another protobuf than its own it raises more than ImportError
            logger.info("[learn] metrics are in %s only; tensorboard cannot be used: %s", self._file.name, error)
            return None
        board = SummaryWriter(str(self._directory / "tensorboard"))
        self._files.callback(board.close)
        return board

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"stage": stage, "step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{stage}/{name}", value, step)
        shown = "  ".join(f"{name} {values[name]:.3f}" for name in _SHOWN if name in values)
        err.print(f"{stage} {step:>5}  {shown}", markup=False, highlight=False, soft_wrap=True)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    return _lines(directory / _METRICS)


def shares_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of all episodes, void ones included, that solved their task and that ended their guest."""
    if not facts:
        return {}
    return {
        "solved_frac": fmean(each.get("task_score", 0) >= 1 for each in facts),
        "escape_frac": fmean(bool(each.get("guest_end_cause")) for each in facts),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _write(directory: Path, record: Mapping[str, Any]) -> None:
    write_atomically(directory / _FILE, (json.dumps(record, indent=1) + "\n").encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
