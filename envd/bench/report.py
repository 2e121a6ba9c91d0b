"""Benchmark reports: figures with their meaning and target, the samples behind them, and checks."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envd.base.errors import EnvdError
from envd.hypervisor.machine import Accelerator

Value = float | bool | None
"""Value of a figure; None if it cannot be measured on this host."""

#: Conditions that differ between two hypervisors of one host.
_OF_HYPERVISOR = ("hypervisor", "accelerator", "host_load_average", "time")
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


class BenchFailed(EnvdError, reason="BENCH_FAILED"):
    """A call failed, or the service returned a wrong result, so that the figures would mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One result."""

    name: str
    """Name with the unit, as in the JSON."""
    value: Value
    meaning: str
    """Exactly what was measured."""
    target: str = ""
    """The value that it should have, such as `<= 20`; empty if there is none."""
    exempt: str = ""
    """Why the target does not apply to this run; empty if it does."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none, it does not apply, or nothing was measured."""
        if not self.target or self.value is None or self.exempt:
            return None
        comparison, limit = self.target.split()
        return _COMPARISONS[comparison](self.value, float(limit))


@cache
def _definitions() -> dict[str, dict[str, Any]]:
    definitions: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text())
    return definitions


def figures_of(
    group: str,
    samples: Mapping[str, Sequence[float]],
    values: Mapping[str, Value],
    *,
    name: str = "{}",
    meaning: str = "{}",
    exempt: str = "",
    has_targets: bool = True,
) -> list[Figure]:
    """Return the figures of a group of `figures.yaml`.

    Args:
        samples: NAME_pNN is that percentile of the samples NAME.
        values: All other figures.
        name: Format of the figures' names.
        meaning: Format of the figures' meanings.
    """
    figures = []
    for key, defined in _definitions()[group].items():
        text, target = (defined["meaning"], defined["target"]) if isinstance(defined, dict) else (defined, "")
        sampled, _, percent = key.rpartition("_p")
        figure = Figure(
            name=name.format(key),
            value=values[key] if key in values else percentile(samples[sampled], int(percent)),
            meaning=meaning.format(text),
            target=target if has_targets else "",
            exempt=exempt,
        )
        figures.append(figure)
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition that must hold, independent of speed."""

    name: str
    passed: bool
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One run of a benchmark."""

    benchmark: str
    conditions: Mapping[str, object]
    """The host, the machines and the settings of the run."""
    figures: Sequence[Figure]
    checks: Sequence[Condition] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The samples behind the figures, in the order of measuring."""
    tables: Mapping[str, Sequence[Mapping[str, str | float]]] = field(default_factory=dict)
    """Further results, by the table's name: rows of columns."""

    @property
    def targets(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.target]

    @property
    def passed(self) -> bool:
        """Whether all checks passed. Targets do not count."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, object]:
        return {
            "benchmark": self.benchmark,
            "passed": self.passed,
            "conditions": dict(self.conditions),
            "results": {figure.name: _rounded(figure.value) for figure in self.figures},
            "targets": {
                figure.name: {
                    "met": figure.met,
                    "value": _rounded(figure.value),
                    "target": figure.target,
                    **({"unless": figure.exempt} if figure.exempt else {}),
                }
                for figure in self.targets
            },
            "checks": [asdict(check) for check in self.checks],
            "method": {figure.name: figure.meaning for figure in self.figures},
            "samples": {name: [_rounded(value) for value in values] for name, values in self.samples.items()},
            **{
                name: [
                    {column: value if isinstance(value, str) else _rounded(value) for column, value in row.items()}
                    for row in rows
                ]
                for name, rows in self.tables.items()
            },
        }

    def print(self, console: Console) -> None:
        for name, value in self.conditions.items():
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
        results = Table("result", "value", "meaning", box=None, pad_edge=False)
        targets = Table("target", "value", "wanted", "", box=None, pad_edge=False)
        for figure in self.figures:
            results.add_row(figure.name, text_of(figure.value), escape(figure.meaning))
        for figure in self.targets:
            verdict = {
                True: "[green]met[/]",
                False: "[bold red]missed[/]",
                None: escape(figure.exempt) or "not measured",
            }[figure.met]
            targets.add_row(figure.name, text_of(figure.value), figure.target, verdict)
        for table in (results, targets):
            table.columns[1].justify = "right"
            console.print()
            console.print(table)
        for rows in self.tables.values():
            shown = Table(*rows[0], box=None, pad_edge=False)
            for row in rows:
                shown.add_row(*(escape(value) if isinstance(value, str) else text_of(value) for value in row.values()))
            console.print()
            console.print(shown)
        for check in self.checks:
            console.print(f"\n{'[green]passed[/]' if check.passed else '[bold red]failed[/]'} {check.name}: ", end="")
            console.print(check.evidence, markup=False, soft_wrap=True)


def compared(report: BenchReport, other: BenchReport) -> BenchReport:
    """Return a report with the figures of the same benchmark on another hypervisor in the table `against`. Pure."""
    others = {figure.name: figure.value for figure in other.figures}
    rows = [
        {"result": each.name, "value": each.value, "against": there, "against_over_value": there / each.value}
        for each in report.figures
        if isinstance(there := others.get(each.name), float | int) and each.value
    ]
    return replace(
        report,
        conditions={**report.conditions, **{f"against_{name}": other.conditions[name] for name in _OF_HYPERVISOR}},
        checks=[*report.checks, *(replace(each, name=f"{each.name}, against") for each in other.checks)],
        samples={**report.samples, **{f"against_{name}": values for name, values in other.samples.items()}},
        tables={**report.tables, "against": rows},
    )


def exempt_without_guests(conditions: Mapping[str, object]) -> str:
    """Return why targets do not apply if no guest code runs; empty if it runs."""
    return "fake desktops: no guest runs" if conditions["accelerator"] == Accelerator.FAKE.value else ""


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """Return the median, or the least sample that `percent` of 100 do not exceed; None without samples."""
    if not samples:
        return None
    return median(samples) if percent == 50 else sorted(samples)[math.ceil(percent * len(samples) / 100) - 1]


def kib(size_bytes: float) -> float:
    return size_bytes / (1 << 10)


def mib(size_bytes: float) -> float:
    return size_bytes / (1 << 20)


def _rounded(value: Value) -> Value:
    if value is None or isinstance(value, bool):
        return value
    # The measurements are not more precise than four digits; large values keep all digits before the point.
    return float(f"{value:.4g}") if abs(value) < 1000 else round(value)


def text_of(value: Value) -> str:
    """Return a value as text: four digits, or all digits before the point."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{_rounded(value):,g}" if abs(value) < 1000 else f"{value:,.0f}"
