"""`envd bench plot`: which plots a report has, what they show, and bad reports."""

import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from envd.base.errors import ConfigError
from envd.bench.plot import write_plots
from tests.support.command import run_envd

REPORTS = Path(__file__).parents[4] / "docs/benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


CONDITIONS: dict[str, object] = {
    "accelerator": "tcg",
    "hypervisor": "libvirt",
    "host_core_count": 2,
    "time": "2026-11-22T21:33:30+00:00",
}


def plotted(directory: Path, **report: object) -> dict[str, ET.Element]:
    """Draw one report `run.json`; return its plots by name."""
    whole = {"benchmark": "x", "conditions": CONDITIONS, "results": {}, "samples": {}, **report}
    (directory / "run.json").write_text(json.dumps(whole))
    return {path.stem: parsed(path) for path in write_plots(directory)}


def parsed(path: Path) -> ET.Element:
    return ET.fromstring(path.read_text())  # noqa: S314 -- ours


def texts(plot: ET.Element) -> list[str]:
    return [text.text or "" for text in plot.iter(f"{SVG}text")]


def dots(plot: ET.Element, name: str) -> list[float]:
    [row] = [group for group in plot.iter(f"{SVG}g") if group.get("id") == name]
    return [float(dot.attrib["x"]) for dot in row.iter(f"{SVG}use")]


def test_every_published_report_has_the_published_plots_of_all_its_times(tmp_path: Path) -> None:
    reports = list(REPORTS.glob("*.json"))
    for report in reports:
        shutil.copy(report, tmp_path)
    written = {path.stem: texts(parsed(path)) for path in write_plots(tmp_path)}
    assert written == {path.stem: texts(parsed(path)) for path in REPORTS.glob("*.svg")}
    assert set(written) >= {report.stem for report in reports} | {"settle-curve", "rates"}
    step = texts(parsed(tmp_path / "step.svg"))
    published = json.loads((REPORTS / "step.json").read_text())["samples"]
    assert {name.removesuffix("_ms").replace("_", " ") for name in published if name.endswith("_ms")} <= set(step)


def test_samples_are_dots_in_their_order_and_their_median_is_named(tmp_path: Path) -> None:
    plot = plotted(tmp_path, samples={"fork_ms": [400.0, 1.0, 20.0], "size_kib": [5.0]})["run"]
    x = dots(plot, "fork")
    assert len(x) == 3
    assert x == sorted(x)
    assert "run (tcg, 2 cores, 2026-11-22)" in texts(plot)
    assert {"fork", "20 ms"} <= set(texts(plot))
    assert "size kib" not in " ".join(texts(plot))


def test_a_row_has_at_most_100_dots_from_its_least_to_its_largest_sample(tmp_path: Path) -> None:
    few = dots(plotted(tmp_path, samples={"lag_ms": [1.0, 1000.0]})["run"], "lag")
    many = dots(plotted(tmp_path, samples={"lag_ms": [float(n) for n in range(1, 1001)]})["run"], "lag")
    assert len(many) == 100
    assert [many[0], many[-1]] == few


def test_samples_of_zero_and_equal_samples_are_drawn(tmp_path: Path) -> None:
    assert len(dots(plotted(tmp_path, samples={"lag_ms": [0.0, 0.0]})["run"], "lag")) == 2
    plot = plotted(tmp_path, samples={"lag_ms": [0.0, 3.0, 3.0], "other_ms": [0.0]})["run"]
    assert (len(dots(plot, "lag")), len(dots(plot, "other"))) == (3, 1)


def test_a_report_without_an_accelerator_names_the_hypervisor_and_its_usable_cores(tmp_path: Path) -> None:
    conditions = {**CONDITIONS, "hypervisor": "fake", "usable_core_count": 1}
    del conditions["accelerator"]
    plot = plotted(tmp_path, conditions=conditions, samples={"fork_ms": [1.0]})["run"]
    assert "run (fake, 1 core, 2026-11-22)" in texts(plot)


def test_all_scale_reports_share_one_plot_of_rates(tmp_path: Path) -> None:
    results = {"steps_per_s": 438, "bare_rpc_per_s": 8256}
    plotted(tmp_path, benchmark="scale", results=results)
    shutil.copy(tmp_path / "run.json", tmp_path / "more.json")
    rates = plotted(tmp_path, benchmark="scale", results=results)["rates"]
    assert {"run: steps", "more: steps", "438", "more: bare gRPC"} <= set(texts(rates))


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "the file"), ("[]", "the file"), ('{"benchmark": "x"}', "conditions")]
)
def test_a_file_that_is_not_a_report_is_an_error_and_nothing_is_written(
    tmp_path: Path, text: str, problem: str
) -> None:
    shutil.copy(REPORTS / "fork.json", tmp_path)
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"other.json: not a report of `envd bench` \({problem}") as caught:
        write_plots(tmp_path)
    assert "move it away" in str(caught.value)
    assert not list(tmp_path.glob("*.svg"))


def test_a_directory_without_reports_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no report"):
        write_plots(tmp_path)


def test_the_command_names_the_files_that_it_wrote(tmp_path: Path) -> None:
    shutil.copy(REPORTS / "fork.json", tmp_path)
    done = run_envd("bench", "plot", str(tmp_path), "--json")
    assert json.loads(done.out) == {"written": [str(tmp_path / "fork.svg")]}
    assert parsed(tmp_path / "fork.svg").tag == f"{SVG}svg"


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shutil.copy(REPORTS / "fork.json", tmp_path)
    with pytest.raises(ConfigError, match=r"plots need matplotlib; install envd-trainer\[plots\]"):
        write_plots(tmp_path)
