"""The page of `envd bench report`: targets that apply, figures that were not measured, and benchmarks that failed."""

import asyncio
import html
import json
import re
from dataclasses import replace
from pathlib import Path

from envd.base.errors import ConfigError
from envd.bench.host_report import Outcome, Report, measure_host, write_page
from envd.bench.report import BenchReport, Condition, Figure

LIMIT = "<= 20"
FIGURES = [
    Figure(name="met_ms", value=12.5, meaning="the time of <all>", target=LIMIT),
    Figure(name="missed_ms", value=25.0, meaning="the same", target=LIMIT),
    Figure(name="exempt_ms", value=30.0, meaning="the same", target=LIMIT, exempt="drawn desktops"),
    Figure(name="unmeasured_mib", value=None, meaning="memory", target=LIMIT),
]
REPORT = BenchReport(
    benchmark="fork",
    conditions={"kernel": "6.1", "machines": 4},
    figures=FIGURES,
    checks=[Condition(name="same", passed=False, evidence="1 of 2")],
)


def rows_of(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(<td>.*?)</tr>", page)
    return [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]


def test_the_page_has_conditions_figures_checks_and_the_targets_that_apply(tmp_path: Path) -> None:
    outcomes: dict[str, Outcome] = {"fork": REPORT, "episodes": "no image"}
    page = write_page(outcomes, tmp_path / "report").read_text()
    _processor, *rows = rows_of(page)
    assert rows == [
        ["kernel", "6.1"],
        ["machines", "4"],
        ["met_ms", "12.5", "<= 20", "met", "the time of <all>"],
        ["missed_ms", "25", "<= 20", "missed", "the same"],
        ["exempt_ms", "30", "", "", "the same"],
        ["unmeasured_mib", "-", "", "", "memory"],
    ]
    assert "<b>failed</b>: same: 1 of 2" in page
    assert "<h2>episodes</h2><p>Not measured: no image.</p>" in page
    assert json.loads((tmp_path / "report" / "fork.json").read_text()) == json.loads(json.dumps(REPORT.as_json()))


def test_conditions_of_one_benchmark_alone_are_in_its_section(tmp_path: Path) -> None:
    """Such as the price of the host, without which costs say nothing."""
    parked = replace(REPORT, benchmark="parked", conditions={"kernel": "6.1", "machines": 8, "price_per_hour": 2.0})
    head, of_fork, of_parked = write_page({"fork": REPORT, "parked": parked}, tmp_path).read_text().split("<h2>")
    assert [row for row in rows_of(head) if row[0] != "processor"] == [["kernel", "6.1"]]
    assert rows_of(of_fork)[0] == ["machines", "4"]
    assert rows_of(of_parked)[:2] == [["machines", "8"], ["price_per_hour", "2.0"]]


def test_a_report_replaces_the_files_of_an_earlier_one_and_no_others(tmp_path: Path) -> None:
    write_page({"fork": REPORT, "branch": replace(REPORT, benchmark="branch")}, tmp_path)
    for name in ("branch.svg", "branch-samples.svg", "branches.svg", "another.json"):
        (tmp_path / name).write_text("not JSON")
    page = write_page({"fork": REPORT}, tmp_path, replaces=["fork", "branch"]).read_text()
    assert {path.name for path in tmp_path.iterdir()} >= {"fork.json", "report.html", "branches.svg", "another.json"}
    assert not [name for name in ("branch.json", "branch.svg", "branch-samples.svg") if (tmp_path / name).exists()]
    # A file that is not ours is named without its directory: the page can be published.
    assert "another.json: not a report of" in page
    assert str(tmp_path) not in page


async def test_a_benchmark_that_fails_or_runs_too_long_leaves_the_others_measured() -> None:
    async def fails(_: Report) -> BenchReport:
        raise ConfigError("no image in /home/alice/.cache of host-7")

    async def measures(report: Report) -> BenchReport:
        report("forking", 0.5)
        return REPORT

    async def hangs(_: Report) -> BenchReport:
        await asyncio.Event().wait()
        raise AssertionError

    progress: list[tuple[str, float]] = []

    def add(stage: str, fraction: float) -> None:
        progress.append((stage, fraction))

    outcomes = await measure_host(
        {"episodes": fails, "fork": measures, "scale": hangs, "step": hangs}, limit_s=0.6, report=add
    )
    late = "not finished within the 0.01 minutes of the report"
    # The page can be published: no path, no name of the host.
    failed = "CONFIG_ERROR; `envd bench episodes` shows the cause"
    assert list(outcomes.values()) == [failed, REPORT, late, late]
    assert progress == [("fork: forking", 0.375)]
