"""Draws the JSON reports of benchmarks as SVG: all samples, growth over machines, the trade-off of settling, steps/s.

Decides which plots a report has; `cuaenv.plots` draws them.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from cuaenv.plots import Point, Series, amounts, connected, strips
from pydantic import BaseModel, ValidationError

from envd.base.errors import ConfigError

#: The name of a list of times: what was measured, its unit, and for `growth` the number of machines.
_TIMES = re.compile(r"(?P<name>\w+?)_(?P<unit>ms|s)(?:_(?P<size>\d+))?")
#: Plots of `growth`: the y axis, and the label of each result.
_GROWTH = {
    "memory": (
        "MiB",
        {"pss_mib": "Pss", "private_dirty_mib": "Private_Dirty", "available_drop_mib": "fall of MemAvailable"},
    ),
    "CPU": ("% of one core", {"machines_cpu_percent": "all machines", "daemon_cpu_percent": "daemon"}),
}


class _Conditions(BaseModel):
    accelerator: str = ""
    """Empty in reports of earlier versions."""
    hypervisor: str
    host_core_count: int
    usable_core_count: int = 0
    """Cores that the benchmark was limited to; 0 in reports without this field."""
    time: datetime
    sizes: list[int] = []


class _Policy(BaseModel):
    policy: str
    late_change_rate: float
    settle_ms_p50: float


class _Report(BaseModel):
    """The parts of `BenchReport.as_json` that plots need."""

    benchmark: str
    conditions: _Conditions
    results: dict[str, float | None]
    samples: dict[str, list[float]]
    curve: list[_Policy] = []

    def title(self, subject: str) -> str:
        """Return a title that says what ran, where and when."""
        host = self.conditions
        count = host.usable_core_count or host.host_core_count
        cores = "1 core" if count == 1 else f"{count} cores"
        return f"{subject} ({host.accelerator or host.hypervisor}, {cores}, {host.time:%Y-%m-%d})"


def write_plots(directory: Path) -> list[Path]:
    """Draw each report `NAME.json` of a directory as `NAME.svg` and `NAME-*.svg` next to it; return these files.

    They replace files of an earlier call. Nothing is written if a report is malformed.

    Raises:
        ConfigError: The directory has no report, or a JSON file of it is not a report.
    """
    reports = {path.stem: _read(path) for path in sorted(directory.glob("*.json"))}
    if not reports:
        raise ConfigError(f"{directory}: no report NAME.json in it; write one with `envd bench step --json`")
    plots = _rates(reports)
    for stem, report in reports.items():
        plots |= _plots(stem, report)
    for name, plot in plots.items():
        (directory / f"{name}.svg").write_text(plot)
    return [directory / f"{name}.svg" for name in plots]


def _read(path: Path) -> _Report:
    try:
        return _Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f"{path}: not a report of `envd bench` ({where}: {first['msg']}); write it with --json, or move it away"
        ) from error


def _plots(stem: str, report: _Report) -> dict[str, str]:
    """Return the plots of a report by name."""
    plots = {}
    times = _times(report.samples)
    if times:
        unit, rows = times
        plots[stem] = strips(rows, title=report.title(stem), unit=unit)
    if report.benchmark == "growth":
        for name, (unit, shown) in _GROWTH.items():
            series = _growth(report, shown)
            if series:
                plots[f"{stem}-{name.lower()}"] = connected(
                    series,
                    title=report.title(f"{stem}: {name}"),
                    x_title="standby machines",
                    y_title=unit,
                    x_ticks=report.conditions.sizes,
                )
    if report.curve:
        plots[f"{stem}-curve"] = _curve(report)
    return plots


def _rates(reports: Mapping[str, _Report]) -> dict[str, str]:
    """Return one plot of all reports of `envd bench scale`, to compare them; none without such a report."""
    scales = {stem: report for stem, report in reports.items() if report.benchmark == "scale"}
    if not scales:
        return {}
    shown = {"steps": "steps_per_s", "bare gRPC": "bare_rpc_per_s"}
    rows = {f"{stem}: {name}": each.results[key] or 0 for stem, each in scales.items() for name, key in shown.items()}
    subject = "steps per second of all clients"
    titles = {each.title(subject) for each in scales.values()}
    # Reports of different hosts have no common title.
    return {"rates": amounts(rows, title=titles.pop() if len(titles) == 1 else subject, x_title="per second")}


def _times(samples: Mapping[str, Sequence[float]]) -> tuple[str, dict[str, Sequence[float]]] | None:
    """Return the unit and the samples of a report's times by label; None if it has none. One report has one unit."""
    rows = {}
    unit = ""
    for name, values in samples.items():
        found = _TIMES.fullmatch(name)
        if found and values:
            unit = found["unit"]
            label = found["name"].replace("_", " ")
            rows[f"{label}, pool of {found['size']}" if found["size"] else label] = values
    return (unit, rows) if rows else None


def _growth(report: _Report, shown: Mapping[str, str]) -> list[Series]:
    """Return a series over the numbers of machines for each result.

    Values that were not measured are left out, and negative ones: MemAvailable rises if other users of the host end.
    """
    found = {
        label: [
            Point(size, value)
            for size in report.conditions.sizes
            if (value := report.results.get(f"{name}_{size}")) is not None and value >= 0
        ]
        for name, label in shown.items()
    }
    return [Series(label, points) for label, points in found.items() if points]


def _curve(report: _Report) -> str:
    """Return the trade-off of settling: a curve per kind of policy, such as `idle 100 ms`."""
    kinds: dict[str, list[Point]] = {"fixed": [], "idle": []}
    for each in report.curve:
        kind, _, rest = each.policy.partition(" ")
        kinds.setdefault(kind, []).append(Point(each.settle_ms_p50, 100 * each.late_change_rate, rest))
    return connected(
        [Series(kind, points) for kind, points in kinds.items() if points],
        title=report.title("settling: waiting time and too early frames"),
        x_title="settle time, median (ms)",
        y_title="% of the steps whose screen changes after their frame",
    )
