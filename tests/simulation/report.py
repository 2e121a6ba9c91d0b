"""Outcomes as JSON rows and as a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.simulation.fleet import Outcome


def as_json_row(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome with the scenario's main settings."""
    row = asdict(outcome)
    scenario = outcome.scenario
    row["scenario"] = {
        "placement": scenario.placement,
        "hosts": scenario.host_count,
        "machines": scenario.machines_per_host,
        "runs": {run.name: {"weight": run.weight, "sizes": run.sizes} for run in scenario.runs},
        "load": scenario.load,
        "minutes": scenario.minutes,
        "seed": scenario.seed,
    }
    return row


def waits(by_size: Mapping[int, float]) -> str:
    """Return waiting times as text: one, or one for each size of group."""
    if len(by_size) == 1:
        return f"{next(iter(by_size.values())):.1f} s"
    return ", ".join(f"{size}: {wait_s:.1f}" for size, wait_s in by_size.items())


def mermaid(outcomes: Sequence[Outcome]) -> str:
    """Return a Mermaid chart of the utilisation by number of hosts, one line for each placement."""
    counts = sorted({outcome.scenario.host_count for outcome in outcomes})
    placements = list(dict.fromkeys(outcome.scenario.placement for outcome in outcomes))
    used = {(each.scenario.placement, each.scenario.host_count): 100 * each.utilisation for each in outcomes}
    lines = [
        "xychart-beta",
        f'  title "Machines in use, %: {", ".join(placements)}"',
        f"  x-axis hosts [{', '.join(map(str, counts))}]",
        '  y-axis "%" 0 --> 100',
    ]
    for name in placements:
        lines.append(f"  line [{', '.join(f'{used[name, count]:.1f}' for count in counts if (name, count) in used)}]")
    return "\n".join(lines)
