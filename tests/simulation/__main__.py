"""`python -m tests.simulation`: how many hosts would behave, on a virtual clock."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.table import Table

from cuaenv.cli.terminal import Json, emit_json, err, out
from envd.base.errors import ConfigError
from envd.cli.command import command
from tests.simulation.fleet import Outcome, simulate
from tests.simulation.report import as_json_row, mermaid, waits
from tests.simulation.scenario import PLACEMENTS, RunLoad, Scenario

_MAX_HOSTS = 100_000


app = typer.Typer(add_completion=False)


@app.command()
@command()
def simulate_command(
    *,
    hosts: Annotated[str, typer.Option(metavar="N,...", help="Numbers of hosts.")] = "1,2,10",
    machines: Annotated[int, typer.Option(min=1, max=4096, help="Machines of each host.")] = 48,
    placement: Annotated[str, typer.Option(metavar="NAME,...", help=f"Of {', '.join(PLACEMENTS)}.")] = "drawn,ideal",
    group: Annotated[str, typer.Option(metavar="N,...", help="Sizes of groups, drawn uniformly.")] = "8",
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run", metavar="NAME=WEIGHT", help="A training run; repeatable. All want equally many machines."
        ),
    ] = None,
    load: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Machine time asked for, as a share of all; 0 for saturation.")
    ] = 0.0,
    minutes: Annotated[float, typer.Option(min=1.0, help="Measured minutes, on the virtual clock.")] = 30.0,
    warmup: Annotated[float, typer.Option(min=0.0, help="Minutes before those.")] = 10.0,
    mtbf_h: Annotated[
        float, typer.Option("--mtbf", min=0.0, help="Hours between failures of a host; 0 for none.")
    ] = 0.0,
    drain_every_s: Annotated[
        float,
        typer.Option("--drain-every", min=0.0, help="Seconds between drains of one host after another; 0 for none."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Simulations at once.")] = 1,
    plot: Annotated[
        bool, typer.Option("--plot", help="Print a Mermaid chart of the utilisation instead of a table.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate many hosts through the planner, the fair share and the choice of hosts that production uses.

    Durations are the measured ones of docs/benchmarks.md. docs/evidence/scale.md has results and method.
    """
    base = Scenario(
        placement="ideal",
        host_count=1,
        machines_per_host=machines,
        runs=_runs(run or ["run=1"], _numbers("--group", group, most=machines)),
        load=load or None,
        minutes=minutes,
        warmup_minutes=warmup,
        seed=seed,
        host_mtbf_h=mtbf_h or None,
        drain_every_s=drain_every_s or None,
    )
    names = [name.strip() for name in placement.split(",")]
    if unknown := [name for name in names if name not in PLACEMENTS]:
        raise ConfigError(f"--placement {unknown[0]}: unknown; choose from {', '.join(PLACEMENTS)}")
    scenarios = [
        replace(base, placement=name, host_count=count)
        for count in _numbers("--hosts", hosts, most=_MAX_HOSTS)
        for name in names
    ]
    outcomes = _simulate_all(scenarios, jobs=jobs)
    if as_json:
        emit_json({"outcomes": [as_json_row(outcome) for outcome in outcomes]})
    elif plot:
        out.print(mermaid(outcomes), markup=False, soft_wrap=True)
    else:
        out.print(_table(outcomes))


def _simulate_all(scenarios: list[Scenario], *, jobs: int) -> list[Outcome]:
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        scenario = outcome.scenario
        line = f"{len(outcomes)} of {len(scenarios)}: {scenario.placement}, {scenario.host_count} hosts"
        err.print(f"{line}, {outcome.event_count} events", markup=False)

    if jobs == 1:
        for scenario in scenarios:
            note(simulate(scenario))
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
            for outcome in processes.map(simulate, scenarios):
                note(outcome)
    return outcomes


def _table(outcomes: list[Outcome]) -> Table:
    columns = ("hosts", "placement", "episodes/h", "used", "wait p50", "wait p99", "fragmented", "unfair", "lost")
    table = Table(*columns, box=None, pad_edge=False)
    for outcome in outcomes:
        table.add_row(
            str(outcome.scenario.host_count),
            outcome.scenario.placement,
            f"{outcome.episodes_per_h:,.0f}",
            f"{100 * outcome.utilisation:.1f} %",
            waits(outcome.wait_p50_s),
            waits(outcome.wait_p99_s),
            f"{100 * outcome.fragmentation:.1f} %",
            f"{100 * outcome.unfairness:.0f} %",
            f"{100 * outcome.lost_share:.2f} %",
        )
    return table


def _numbers(flag: str, text: str, *, most: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise ConfigError(f"{flag} {text}: not numbers from 1 to {most}; separate several by commas")
    return tuple(map(int, parts))


def _runs(texts: list[str], sizes: tuple[int, ...]) -> tuple[RunLoad, ...]:
    runs = []
    for text in texts:
        name, _, weight = text.partition("=")
        try:
            runs.append(RunLoad(name=name, weight=float(weight or 1), sizes=sizes))
        except ValueError:
            raise ConfigError(f"--run {text}: the weight is not a number; give NAME=WEIGHT") from None
        if not name or runs[-1].weight <= 0:
            raise ConfigError(f"--run {text}: give a name, and a weight above 0")
    return tuple(runs)


if __name__ == "__main__":
    app()
