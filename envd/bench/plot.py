"""Draws the JSON reports of benchmarks as SVG: all samples, the trade-off of settling, steps per second.

Needs the extra `plots`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ValidationError

from cuaenv.plots import svg_plot
from cuaenv.problems import first_problem
from envd.base.errors import ConfigError

#: The name of a list of times: what was measured, and its unit.
_TIMES = re.compile(r"(?P<name>\w+?)_(?P<unit>ms|s)")
#: Most dots of a row of samples.
_MAX_DOTS = 100


class _Conditions(BaseModel):
    accelerator: str = ""
    """Empty in reports of earlier versions."""
    hypervisor: str
    host_core_count: int
    usable_core_count: int = 0
    """Cores that the benchmark was limited to; 0 in reports without this field."""
    time: datetime


class _PlottedPolicy(BaseModel):
    policy: str
    late_change_rate: float
    settle_ms_p50: float


class _Report(BaseModel):
    """The parts of `BenchReport.as_json` that plots need."""

    benchmark: str
    conditions: _Conditions
    results: dict[str, float | None]
    samples: dict[str, list[float]]
    curve: list[_PlottedPolicy] = []

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
        ConfigError: The directory has no report, a JSON file of it is not a report, or matplotlib is not installed.
    """
    reports = {path.with_suffix(""): _read(path) for path in sorted(directory.glob("*.json"))}
    if not reports:
        raise ConfigError(f"{directory}: no report NAME.json; write one with `envd bench step --json`")
    try:
        return [
            *_draw_rates(directory / "rates.svg", {path.name: each for path, each in reports.items()}),
            *(plot for path, report in reports.items() for plot in _draw(path, report)),
        ]
    except ImportError as error:
        raise ConfigError(f"envd bench plot: {error}") from error


def _read(path: Path) -> _Report:
    try:
        return _Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = first_problem(error.errors(), whole="the file")
        raise ConfigError(
            f"{path}: not a report of `envd bench` ({problem}); write it with --json, or move it away"
        ) from error


def _draw(path: Path, report: _Report) -> list[Path]:
    written = []
    if times := _times(report.samples):
        written.append(path.with_name(f"{path.name}.svg"))
        _draw_samples(written[-1], *times, title=report.title(path.name))
    if report.curve:
        written.append(path.with_name(f"{path.name}-curve.svg"))
        _draw_curve(written[-1], report)
    return written


def _draw_samples(path: Path, unit: str, rows: Mapping[str, Sequence[float]], *, title: str) -> None:
    """Draw the samples of each row as dots, with a line at the row's median.

    Of a row with more than 100 samples, 100 are drawn that are evenly spaced in their order of size.
    """
    least = min((value for values in rows.values() for value in values if value > 0), default=1.0)
    with svg_plot(path, title=title, height_in=1.2 + 0.3 * len(rows)) as axes:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415 -- an extra

        for row, (name, values) in enumerate(rows.items()):
            ordered = sorted(values)
            count = min(len(ordered), _MAX_DOTS)
            # A sample of 0 has no place on a logarithmic axis.
            x = [max(least, ordered[index * (len(ordered) - 1) // max(1, count - 1)]) for index in range(count)]
            # Spread over the row's height in a fixed pattern, so that equal samples do not hide each other.
            y = [row - 0.3 + 0.6 * (index * 0.618 % 1) for index in range(count)]
            axes.plot(x, y, "o", color="C0", alpha=0.4, markersize=4, markeredgewidth=0, gid=name)
            middle = median(values)
            axes.vlines(max(least, middle), row - 0.4, row + 0.4, color="C1", linewidth=2.5)
            axes.text(1.01, row, f"{_number(middle)} {unit}", va="center", transform=axes.get_yaxis_transform())
        axes.set(xscale="log", xlabel=f"{unit}, logarithmic; a line is a median")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")


def _draw_curve(path: Path, report: _Report) -> None:
    """Draw the trade-off of settling: a curve per kind of policy, such as `idle 100 ms`."""
    kinds: dict[str, list[_PlottedPolicy]] = {"fixed": [], "idle": []}
    for each in report.curve:
        kinds.setdefault(each.policy.partition(" ")[0], []).append(each)
    with svg_plot(path, title=report.title("settling: waiting time and too early frames")) as axes:
        room_ms = max(each.settle_ms_p50 for each in report.curve) / 10
        for index, (kind, policies) in enumerate(kinds.items()):
            if not policies:
                continue
            points = [(each.settle_ms_p50, 100 * each.late_change_rate) for each in policies]
            axes.plot(*zip(*points, strict=True), "o-" if len(points) > 1 else "s", label=kind)
            labelled = (-math.inf, 0.0)
            for each, (x, y) in zip(policies, points, strict=True):
                if x - labelled[0] >= room_ms or y != labelled[1]:
                    labelled = (x, y)
                    # Below the points of every second kind, so that labels of neighbours do not overlap.
                    offset = (5, -12 if index % 2 else 5)
                    axes.annotate(each.policy.partition(" ")[2], labelled, offset, textcoords="offset points")
        axes.set(xlabel="settle time, median (ms)", ylabel="% of the steps that change after their frame")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.legend()


def _draw_rates(path: Path, reports: Mapping[str, _Report]) -> list[Path]:
    """Draw one plot of all reports of `envd bench scale`, to compare them; return it. None without such a report."""
    scales = {stem: report for stem, report in reports.items() if report.benchmark == "scale"}
    if not scales:
        return []
    shown = {"steps": "steps_per_s", "bare gRPC": "bare_rpc_per_s"}
    rows = {f"{stem}: {name}": each.results[key] or 0 for stem, each in scales.items() for name, key in shown.items()}
    subject = "steps per second of all clients"
    titles = {each.title(subject) for each in scales.values()}
    # Reports of different hosts have no common title.
    title = titles.pop() if len(titles) == 1 else subject
    with svg_plot(path, title=title, height_in=1.1 + 0.3 * len(rows)) as axes:
        axes.bar_label(axes.barh(list(rows), list(rows.values())), fmt=_number, padding=4)
        axes.set(xlabel="per second")
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
    return [path]


def _times(samples: Mapping[str, Sequence[float]]) -> tuple[str, dict[str, Sequence[float]]] | None:
    """Return the unit and the samples of a report's times by label; None if it has none. One report has one unit."""
    rows = {}
    unit = ""
    for name, values in samples.items():
        found = _TIMES.fullmatch(name)
        if found and values:
            unit = found["unit"]
            rows[found["name"].replace("_", " ")] = values
    return (unit, rows) if rows else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
