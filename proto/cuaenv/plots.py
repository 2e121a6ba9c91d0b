"""Plots as SVG files that read well on a light and on a dark page. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

_COLOURS = ("#3b82c4", "#d9722e", "#3d9a62", "#9a6bc0", "#b08a1e", "#c2526b")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#3d444d}.title{font-size:15px;font-weight:600}"
    ".grid{stroke:#8c959f;stroke-opacity:.35}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.page{fill:#0d1117}}"
)
_WIDTH, _RIGHT, _TOP = 760, 28, 40
_ROW = 20
_STRIP = 28
#: Room at the right of strips for their medians.
_MEDIANS = 90
#: Most dots of a strip.
_MAX_DOTS = 100
#: Least distance between points that have labels.
_LABEL_GAP = 48
#: Updates whose mean is one point of a curve: one update has few episodes.
_WINDOW = 5


class Line(NamedTuple):
    """A curve: points in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


class Point(NamedTuple):
    """A measured point; `label` is shown next to it if there is room."""

    x: float
    y: float
    label: str = ""


class Series(NamedTuple):
    """Points that are connected in their order."""

    name: str
    points: Sequence[Point]


class _Frame:
    """A plot under construction: a title, and axes with room for `left` and `bottom`.

    With `x_min` the x axis is logarithmic from there; otherwise it is linear from 0.
    """

    def __init__(
        self, title: str, *, height: int, left: int, bottom: int, x_max: float, y_max: float = 1.0, x_min: float = 0.0
    ) -> None:
        self.left, self.height, self.bottom = left, height, bottom
        self._x_max, self._y_max, self._x_min = x_max or 1.0, y_max or 1.0, x_min
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<style>{_STYLE}</style><title>{escape(title)}</title>",
            f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
            f'<text class="title" x="12" y="20">{escape(title)}</text>',
        ]

    def x(self, value: float) -> float:
        share = value / self._x_max
        if self._x_min:
            share = math.log(max(value, self._x_min) / self._x_min) / math.log(self._x_max / self._x_min)
        return self.left + share * (_WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - self.bottom - value / self._y_max * (self.height - self.bottom - _TOP)

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="middle"'
        self.add(f"<text {place}>{escape(text)}</text>")

    def x_axis(self, title: str, *, ticks: Iterable[float] = ()) -> None:
        floor = self.height - self.bottom
        labelled = -math.inf
        for value in ticks or _ticks(self._x_max):
            at = self.x(value)
            self.add(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{floor}"/>')
            if at - labelled >= 24:
                self.text(at, floor + 14, _number(value), anchor="middle")
                labelled = at
        self.text((self.left + _WIDTH - _RIGHT) / 2, floor + 34, title, anchor="middle")

    def y_axis(self) -> None:
        for value in _ticks(self._y_max):
            at = self.y(value)
            self.add(f'<line class="grid" x1="{self.left}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}"/>')
            self.text(self.left - 8, at, _number(value), anchor="end")

    def dot(self, x: float, y: float, colour: str, *, radius: float = 4, opacity: float = 1) -> None:
        self.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}" fill-opacity="{opacity:g}"/>')

    def legend(self, index: int, name: str, *, right: bool = False) -> None:
        x, y = (_WIDTH - _RIGHT - 150 if right else self.left + 10), _TOP + 12 + 18 * index
        self.add(f'<rect x="{x}" y="{y - 2}" width="18" height="4" fill="{_colour(index)}"/>')
        self.text(x + 24, y, name)

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def lines(curves: Sequence[Line], *, title: str, x_title: str) -> str:
    """Return curves, smoothed if they are long, with a band from the lowest to the highest of them."""
    smooth = [Line(curve.name, _smoothed(curve.points)) for curve in curves if curve.points]
    values = [y for curve in smooth for _, y in curve.points]
    y_max = 1.0 if max(values, default=0.0) <= 1 else max(values)
    x_max = max((x for curve in smooth for x, _ in curve.points), default=1.0)
    frame = _Frame(title, height=380, left=60, bottom=52, x_max=x_max, y_max=y_max)
    frame.y_axis()
    frame.x_axis(x_title)
    if len(smooth) > 1:
        columns = [[point for point in column if point] for column in zip_longest(*(each.points for each in smooth))]
        middle = [sum(x for x, _ in column) / len(column) for column in columns]
        high = [(x, max(y for _, y in column)) for x, column in zip(middle, columns, strict=True)]
        low = [(x, min(y for _, y in column)) for x, column in zip(middle, columns, strict=True)]
        frame.add(f'<polygon points="{_path(frame, [*high, *reversed(low)])}" fill="#8c959f" fill-opacity=".2"/>')
    for index, curve in enumerate(smooth):
        path = _path(frame, curve.points)
        frame.add(f'<polyline points="{path}" fill="none" stroke="{_colour(index)}" stroke-width="2"/>')
        frame.legend(index, curve.name)
    return frame.svg()


def connected(
    series: Sequence[Series], *, title: str, x_title: str, y_title: str, x_ticks: Sequence[float] = ()
) -> str:
    """Return measured points, connected within each series. A series of one point is a ring.

    Args:
        series: At least one, with one point or more each; coordinates are 0 or more.
        title: Of the plot.
        x_title: Of the x axis.
        y_title: Shown above the y axis.
        x_ticks: Of the x axis; round values by default.
    """
    points = [point for each in series for point in each.points]
    x_max, y_max = 1.08 * max(point.x for point in points), 1.08 * max(point.y for point in points)
    frame = _Frame(title, height=380, left=72, bottom=52, x_max=x_max, y_max=y_max)
    frame.y_axis()
    frame.x_axis(x_title, ticks=x_ticks)
    frame.text(12, _TOP - 4, y_title)
    for index, each in enumerate(series):
        path = _path(frame, [(point.x, point.y) for point in each.points])
        frame.add(f'<polyline points="{path}" fill="none" stroke="{_colour(index)}" stroke-width="2"/>')
        labelled: list[tuple[float, float]] = []
        for point in each.points:
            x, y = frame.x(point.x), frame.y(point.y)
            if len(each.points) == 1:
                ring = f'cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none"'
                frame.add(f'<circle {ring} stroke="{_colour(index)}" stroke-width="2"/>')
            else:
                frame.dot(x, y, _colour(index))
            if point.label and all(math.dist((x, y), other) >= _LABEL_GAP for other in labelled):
                labelled.append((x, y))
                # Below the points of every second series, so that the labels of neighbouring series do not overlap.
                frame.text(x + 6, y + (15 if index % 2 else -12), point.label)
        frame.legend(index, each.name, right=not x_ticks)
    return frame.svg()


def strips(rows: Mapping[str, Sequence[float]], *, title: str, unit: str) -> str:
    """Return the samples of each row as dots on a logarithmic axis, with a line at the row's median.

    Args:
        rows: At least one, with one sample or more each. A sample of 0 is drawn at the left edge. Of a row with more
            than 100 samples, 100 are drawn that are evenly spaced in their order of size.
        title: Of the plot.
        unit: Of the samples.
    """
    samples = [value for values in rows.values() for value in values if value > 0] or [1.0]
    ticks = _log_ticks(min(samples), max(samples))
    height = _TOP + 14 + _STRIP * len(rows) + 52
    frame = _Frame(title, height=height, left=_label_room(rows) + _MEDIANS, bottom=52, x_max=ticks[-1], x_min=ticks[0])
    frame.x_axis(f"{unit}, logarithmic; a line is a median", ticks=ticks)
    for row, (name, values) in enumerate(rows.items()):
        at = _TOP + 20 + _STRIP * row
        frame.text(frame.left - 8 - _MEDIANS, at, name, anchor="end")
        ordered = sorted(values)
        shown = min(len(ordered), _MAX_DOTS)
        for index in range(shown):
            value = ordered[index * (len(ordered) - 1) // max(1, shown - 1)]
            # Spread over the strip's height in a fixed pattern, so that equal samples do not hide each other.
            frame.dot(frame.x(value), at - 8 + 16 * (index * 0.618 % 1), _COLOURS[0], radius=3, opacity=0.35)
        middle = median(values)
        line = f'x1="{frame.x(middle):.1f}" y1="{at - 11}" x2="{frame.x(middle):.1f}" y2="{at + 11}"'
        frame.add(f'<line {line} stroke="{_COLOURS[1]}" stroke-width="3"/>')
        frame.text(frame.left - 8, at, f"{_number(middle)} {unit}", anchor="end")
    return frame.svg()


def amounts(rows: Mapping[str, float], *, title: str, x_title: str) -> str:
    """Return one bar from 0 for each row; at least one row, values are 0 or more."""
    height = _TOP + 10 + _STRIP * len(rows) + 52
    frame = _Frame(title, height=height, left=_label_room(rows), bottom=52, x_max=1.15 * max(rows.values()))
    frame.x_axis(x_title)
    for row, (name, value) in enumerate(rows.items()):
        at = _TOP + 18 + _STRIP * row
        frame.text(frame.left - 8, at, name, anchor="end")
        end = frame.x(value)
        frame.add(
            f'<rect x="{frame.left}" y="{at - 8}" width="{end - frame.left:.1f}" height="16" fill="{_COLOURS[0]}"/>'
        )
        frame.text(end + 6, at, _number(value))
    return frame.svg()


def bars(rows: Mapping[str, tuple[float | None, float | None]], *, title: str, names: tuple[str, str]) -> str:
    """Return two bars from 0 to 1 for each row; None for a missing one."""
    height = _TOP + 24 + 2 * _ROW * len(rows) + 52
    frame = _Frame(title, height=height, left=_label_room(rows), bottom=52, x_max=1.0)
    frame.x_axis("success")
    for index, name in enumerate(names):
        x = frame.left + 10 + 100 * index
        frame.add(f'<rect x="{x}" y="{_TOP + 4}" width="12" height="12" fill="{_COLOURS[index]}"/>')
        frame.text(x + 18, _TOP + 11, name)
    for row, (name, pair) in enumerate(rows.items()):
        top = _TOP + 26 + 2 * _ROW * row
        frame.text(frame.left - 8, top + _ROW - 4, name, anchor="end")
        for index, value in enumerate(pair):
            if value is not None:
                width = max(1.0, frame.x(value) - frame.left)
                place = f'x="{frame.left}" y="{top + index * 16}" width="{width:.1f}" height="14"'
                frame.add(f'<rect {place} fill="{_COLOURS[index]}"/>')
    return frame.svg()


def intervals(rows: Mapping[str, tuple[float, float, float]], *, title: str) -> str:
    """Return a point with an interval from low to high for each row."""
    height = _TOP + 10 + 26 * len(rows) + 52
    x_max = min(1.0, max((high for _, _, high in rows.values()), default=1.0) + 0.05)
    frame = _Frame(title, height=height, left=_label_room(rows), bottom=52, x_max=x_max)
    frame.x_axis("success")
    for row, (name, (value, low, high)) in enumerate(rows.items()):
        at = _TOP + 18 + 26 * row
        frame.text(frame.left - 8, at, name, anchor="end")
        line = f'x1="{frame.x(low):.1f}" y1="{at}" x2="{frame.x(high):.1f}" y2="{at}"'
        frame.add(f'<line {line} stroke="{_COLOURS[0]}" stroke-width="3" stroke-opacity=".5"/>')
        frame.add(f'<circle cx="{frame.x(value):.1f}" cy="{at}" r="5" fill="{_COLOURS[0]}"/>')
    return frame.svg()


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) < 4 * _WINDOW:
        return list(points)
    windows = [points[max(0, end - _WINDOW) : end] for end in range(1, len(points) + 1)]
    return [(window[-1][0], sum(y for _, y in window) / len(window)) for window in windows]


def _path(frame: _Frame, points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _ticks(end: float) -> list[float]:
    """Return about five round values from 0 to `end`."""
    rough = end / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * 0.999)
    return [step * index for index in range(math.floor(end / step * 1.001) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, and for a range below a thousand 2 and 5 times them, that include `low` and `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [digit * 10.0**power for power in powers for digit in ((1, 2, 5) if high < 1000 * low else (1,))]
    first = max(index for index, step in enumerate(steps) if step <= low)
    last = min(index for index, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def _label_room(rows: Iterable[str]) -> int:
    return 24 + 7 * max(map(len, rows), default=4)


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 10 else f"{value:.2g}"
