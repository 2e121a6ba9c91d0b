"""One page about a host: several benchmarks in turn, within a time, with conditions, figures, checks and plots.

A benchmark that fails, or for which no time is left, is named on the page with the reason. The page has no name,
address or path of its host, so that people can publish it.
"""

import asyncio
import base64
import html
import json
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from string import Template

from envd.base.errors import ConfigError, EnvdError
from envd.bench.plot import write_plots
from envd.bench.report import BenchReport, text_of

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]
Measure = Callable[[Report], Awaitable[BenchReport]]
#: A report, or why there are no figures.
Outcome = BenchReport | str

PAGE = "report.html"
_TEMPLATE = Template(Path(__file__).with_name("host_report.html").read_text(encoding="utf-8"))
_VERDICTS = {True: "met", False: "missed", None: ""}


async def measure_host(measures: Mapping[str, Measure], *, limit_s: float, report: Report) -> dict[str, Outcome]:
    """Run benchmarks by name, in turn.

    Args:
        limit_s: Time for all of them. The one that runs then is cut off, and later ones are not started.
    """
    end_s = time.monotonic() + limit_s
    outcomes: dict[str, Outcome] = {}
    for number, (name, measure) in enumerate(measures.items()):

        def on_progress(stage: str, fraction: float, number: int = number, name: str = name) -> None:
            report(f"{name}: {stage}", (number + fraction) / len(measures))

        try:
            async with asyncio.timeout(end_s - time.monotonic()):
                outcomes[name] = await measure(on_progress)
        except TimeoutError:
            outcomes[name] = f"not finished within the {limit_s / 60:g} minutes of the report"
        except EnvdError as error:
            # Its text may have a path or the name of the host.
            logger.warning("bench %s: %s", name, error)
            outcomes[name] = f"{error.reason}; `envd bench {name}` shows the cause"
    return outcomes


def write_page(outcomes: Mapping[str, Outcome], directory: Path, *, replaces: Iterable[str] = ()) -> Path:
    """Write each report as JSON and, with matplotlib, as plots, and a page with all of it; return the page.

    Args:
        replaces: Benchmarks whose files of an earlier report, perhaps of another backend, are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in replaces:
        for old in (directory / f"{name}.json", directory / f"{name}.svg", *directory.glob(f"{name}-*.svg")):
            old.unlink(missing_ok=True)
    for name, outcome in outcomes.items():
        if isinstance(outcome, BenchReport):
            text = json.dumps(outcome.as_json(), indent=1)
            (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    try:
        plots, note = write_plots(directory), ""
    except ConfigError as error:
        plots, note = [], str(error).replace(f"{directory}/", "")
    page = directory / PAGE
    page.write_text(_page(outcomes, plots, note), encoding="utf-8")
    return page


def _page(outcomes: Mapping[str, Outcome], plots: list[Path], note: str) -> str:
    conditions = [each.conditions for each in outcomes.values() if isinstance(each, BenchReport)]
    shared = {
        name: value
        for name, value in (conditions[0] if conditions else {}).items()
        if all(name in each and each[name] == value for each in conditions)
    }
    sections = [
        _section(name, outcome, [plot for plot in plots if plot.stem.split("-")[0] == name], shared=shared)
        for name, outcome in outcomes.items()
    ]
    host = _rows((name, str(value)) for name, value in {"processor": processor_name(), **shared}.items())
    return _TEMPLATE.substitute(host=host, parts="\n".join(sections), note=html.escape(note))


def _section(name: str, outcome: Outcome, plots: list[Path], *, shared: Mapping[str, object]) -> str:
    """Return the section of a benchmark, with the conditions that it does not share with all others."""
    title = f"<h2>{html.escape(name)}</h2>"
    if isinstance(outcome, str):
        return f"{title}<p>Not measured: {html.escape(outcome)}.</p>"
    own = _rows((key, str(value)) for key, value in outcome.conditions.items() if key not in shared)
    figures = _rows(
        (each.name, text_of(each.value), target if verdict else "", verdict, each.meaning)
        for each in outcome.figures
        for target, verdict in [(each.target, _VERDICTS[each.met])]
    )
    checks = "".join(
        f"<p>{'passed' if check.passed else '<b>failed</b>'}: {html.escape(f'{check.name}: {check.evidence}')}</p>"
        for check in outcome.checks
    )
    pictures = "".join(
        f'<img alt="{plot.stem}" src="data:image/svg+xml;base64,{base64.b64encode(plot.read_bytes()).decode()}">'
        for plot in plots
    )
    head = "<tr><th>figure</th><th>value</th><th>target</th><th></th><th>meaning</th></tr>"
    return f"{title}<table>{own}</table>{pictures}<table>{head}{figures}</table>{checks}"


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
