"""Plots as SVG files that read well on a light and on a dark page. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import NamedTuple

_COLOURS = ("#3b82c4", "#d9722e", "#3d9a62", "#9a6bc0", "#b08a1e", "#c2526b")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#3d444d}.title{font-size:15px;font-weight:600}"
    ".grid{stroke:#8c959f;stroke-opacity:.35}"
    "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}}"
)
_WIDTH, _RIGHT, _TOP = 760, 20, 40
_ROW = 20
#: Updates whose mean is one point of a curve: one update has few episodes.
_WINDOW = 5


class Line(NamedTuple):
    """A curve: points in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


class _Frame:
    """A plot under construction: a title, and axes with room for `left` and `bottom`."""

    def __init__(self, title: str, *, height: int, left: int, bottom: int, x_max: float, y_max: float = 1.0) -> None:
        self.left, self.height, self.bottom = left, height, bottom
        self._x_max, self._y_max = x_max or 1.0, y_max or 1.0
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<style>{_STYLE}</style><title>{escape(title)}</title>",
            f'<text class="title" x="12" y="20">{escape(title)}</text>',
        ]

    def x(self, value: float) -> float:
        return self.left + value / self._x_max * (_WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - self.bottom - value / self._y_max * (self.height - self.bottom - _TOP)

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="middle"'
        self.add(f"<text {place}>{escape(text)}</text>")

    def x_axis(self, title: str) -> None:
        floor = self.height - self.bottom
        for value in _ticks(self._x_max):
            at = self.x(value)
            self.add(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{floor}"/>')
            self.text(at, floor + 14, _number(value), anchor="middle")
        self.text((self.left + _WIDTH - _RIGHT) / 2, floor + 34, title, anchor="middle")

    def y_axis(self) -> None:
        for value in _ticks(self._y_max):
            at = self.y(value)
            self.add(f'<line class="grid" x1="{self.left}" y1="{at:.1f}" x2="{_WIDTH - _RIGHT}" y2="{at:.1f}"/>')
            self.text(self.left - 8, at, _number(value), anchor="end")

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
        colour = _COLOURS[index % len(_COLOURS)]
        frame.add(f'<polyline points="{_path(frame, curve.points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = _TOP + 12 + 18 * index
        frame.add(f'<rect x="{frame.left + 10}" y="{at - 2}" width="18" height="4" fill="{colour}"/>')
        frame.text(frame.left + 34, at, curve.name)
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


def _label_room(rows: Iterable[str]) -> int:
    return 24 + 7 * max(map(len, rows), default=4)


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 10 else f"{value:.2g}"
