"""Stage `report`: success on held-out tasks before and after, of all runs in some run directories, and plots."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from cuaenv.plots import svg_plot
from trainer.data.split import template_id
from trainer.evaluate.statistics import ByTemplate, PooledRate, pooled_gain, pooled_rate
from trainer.learn import LearnError
from trainer.learn.record import HeldOutEvaluation, read_evaluations, read_metrics, read_record, run_directories

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Evaluations by the temperature of their replies.
_KINDS = ("greedy", "sampled")
_PARTS = {"all": None, "unseen_seeds": "train", "unseen_templates": "held_out"}
_CURVES = {"success_frac": "success", "sampled_entropy": "entropy (nats)", "void_frac": "share of void episodes"}
#: Shares of all training episodes, void ones included.
SHARES = ("solved_frac", "escape_frac")
#: Updates whose mean is one point of a long curve: one update has few episodes.
_WINDOW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnRun:
    """One run of the stage `rl`."""

    name: str
    record: Mapping[str, Any]
    splits: Mapping[str, str]
    evaluations: Sequence[HeldOutEvaluation]
    updates: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, directory: Path, *, name: str, splits: Mapping[str, str]) -> Self:
        return cls(
            name=name,
            record=read_record(directory),
            splits=splits,
            evaluations=read_evaluations(directory),
            updates=[each for each in read_metrics(directory) if each["stage"] == "rl"],
        )

    @property
    def ablation(self) -> str:
        """Name of its comparison; empty for a plain run."""
        return str(self.record["ablation"])

    @property
    def is_complete(self) -> bool:
        """Whether it was evaluated at its end."""
        return bool(self.after("greedy"))

    def before(self, kind: str, part: str = "all") -> ByTemplate:
        """Return the results of its first evaluation, `greedy` or `sampled`; empty without one."""
        found = self.evaluations_of(kind)
        return self._results(found[0], part) if found else {}

    def after(self, kind: str, part: str = "all") -> ByTemplate:
        """Return the results of its last evaluation; empty if the run ended before that."""
        found = self.evaluations_of(kind)
        return self._results(found[-1], part) if len(found) > 1 else {}

    def evaluations_of(self, kind: str) -> list[HeldOutEvaluation]:
        """Return its evaluations with `greedy` or `sampled` replies, in order."""
        return [each for each in self.evaluations if (each.temperature > 0) == (kind == "sampled")]

    def _results(self, evaluation: HeldOutEvaluation, part: str) -> ByTemplate:
        split = _PARTS[part]
        results = by_template(evaluation)
        return {name: each for name, each in results.items() if split is None or self.splits.get(name) == split}

    def shares(self) -> dict[str, list[float]]:
        """Return the means of `SHARES` over its first and over its last updates; nothing for runs without them."""
        ends = (self.updates[:_WINDOW], self.updates[-_WINDOW:])
        names = [name for name in SHARES if self.updates and name in self.updates[0]]
        return {name: [fmean(each[name] for each in end) for end in ends] for name in names}

    def as_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            **{key: self.record[key] for key in ("ablation", "arm", "seed", "status", "error")},
            "updates": len(self.updates),
            "env_steps": self.updates[-1].get("env_steps", 0.0) if self.updates else 0.0,
        }
        for key in ("s", "steps_per_s", "void_frac"):
            name = "seconds_per_update" if key == "s" else key
            entry[name] = fmean(each[key] for each in self.updates) if self.updates else None
        entry |= self.shares()
        return entry | ({kind: _summary([self], kind) for kind in _KINDS} if self.evaluations else {})


def by_template(evaluation: HeldOutEvaluation) -> dict[str, list[float]]:
    """Return whether each valid episode succeeded."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in evaluation.scores:
        if each.score is not None:
            found[template_id(each.task_id)].append(float(each.score >= 1))
    return dict(found)


def write_report(runs: Sequence[Path], directory: Path) -> dict[str, Any]:
    """Write `results.json` and plots to `directory`; return the results.

    Runs that ended before their last evaluation are listed and not summed up.

    Raises:
        LearnError: There is no run, a run has no demonstrations, or matplotlib is not installed; in this last case
            `results.json` is written.
    """
    found = read_runs(runs)
    if not any(run.updates or run.evaluations for run in found):
        names = ", ".join(map(str, runs))
        raise LearnError(f"run {names}: it has no updates and no evaluations; run the stage `rl` first")
    plain = [run for run in found if not run.ablation] or [run for run in found if run.ablation == "baseline"]
    results = {
        "grpo": {**_grpo(plain), "by_template": _templates(plain)},
        "runs": {run.name: run.as_json() for run in found},
    }
    write_results(directory, results)
    try:
        _draw(directory, plain, results)
    except ImportError as error:
        raise LearnError(f"report {directory}: results.json is written, but {error}") from error
    return results


def write_results(directory: Path, results: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def read_runs(paths: Sequence[Path]) -> list[LearnRun]:
    """Return the runs of the stage `rl` in run directories. Raises: LearnError: One has no demonstrations."""
    found = []
    for path in paths:
        try:
            splits = json.loads((path / "demos" / "splits.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise LearnError(f"run {path}: no demonstrations: {error}; name a directory of `trainer learn`") from error
        prefix = f"{path.name}/" if len(paths) > 1 else ""
        found += [LearnRun.read(each, name=f"{prefix}{each.name}", splits=splits) for each in run_directories(path)]
    return found


# Sums


def pooled(runs: Iterable[ByTemplate]) -> dict[str, list[float]]:
    """Return the results of several runs as those of one."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, values in run.items():
            found[name] += values
    return dict(found)


def before_and_after(before: ByTemplate, after: ByTemplate) -> dict[str, Any]:
    """Return both rates and the gain, with their intervals, as fields of a report."""
    return {
        **pooled_rate(before).as_fields("held_out_before"),
        **pooled_rate(after).as_fields("held_out_after"),
        **pooled_gain(before, after).as_fields("held_out_gain"),
    }


def _summary(runs: Sequence[LearnRun], kind: str) -> dict[str, Any]:
    return {
        part: before_and_after(
            pooled(run.before(kind, part) for run in runs), pooled(run.after(kind, part) for run in runs)
        )
        for part in _PARTS
    }


def _grpo(runs: Sequence[LearnRun]) -> dict[str, Any]:
    complete = [run for run in runs if run.is_complete]
    greedy = _summary(complete, "greedy")
    return {
        "seeds": len(complete),
        "incomplete": len(runs) - len(complete),
        **greedy.pop("all"),
        **greedy,
        "sampled": _summary(complete, "sampled"),
    }


def _templates(runs: Sequence[LearnRun]) -> dict[str, Any]:
    complete = [run for run in runs if run.is_complete]
    before = {kind: pooled(run.before(kind) for run in complete) for kind in _KINDS}
    after = {kind: pooled(run.after(kind) for run in complete) for kind in _KINDS}
    splits = {name: split for run in complete for name, split in run.splits.items()}
    return {
        name: {
            "split": splits.get(name, ""),
            **{
                kind: {
                    "before": _mean(before[kind].get(name)),
                    "after": _mean(after[kind].get(name)),
                    "count": len(after[kind].get(name, ())),
                }
                for kind in _KINDS
            },
        }
        for name in sorted({name for kind in _KINDS for name in before[kind]})
    }


def _mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None


# Plots


def _draw(directory: Path, runs: Sequence[LearnRun], results: Mapping[str, Any]) -> None:
    for name, title in _CURVES.items():
        curves = {run.name: [(steps_of(each), each[name]) for each in run.updates if name in each] for run in runs}
        draw_curves(directory / f"{name}.svg", curves, title=f"Training: {title}")
    held_out = {run.name: _held_out(run) for run in runs}
    if any(held_out.values()):
        draw_curves(directory / "held_out.svg", held_out, title="Held-out tasks: greedy success")
        templates = {name: each["greedy"] for name, each in results["grpo"]["by_template"].items()}
        title = "Greedy success on held-out tasks by template"
        with svg_plot(directory / "templates.svg", title=title, height_in=1.2 + 0.4 * len(templates)) as axes:
            for index, when in enumerate(("before", "after")):
                rows = [row + 0.4 * index - 0.2 for row in range(len(templates))]
                axes.barh(rows, [each[when] or 0.0 for each in templates.values()], height=0.36, label=when)
            axes.legend()
            set_rows(axes, list(templates), x_max=1.0)


def draw_curves(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> None:
    """Draw curves, smoothed if they are long. Those without points are left out."""
    with svg_plot(path, title=title) as axes:
        for name, points in curves.items():
            if points:
                axes.plot(*zip(*_smoothed(points), strict=True), label=name, gid=name)
        axes.set(xlabel="environment steps", xlim=(0, None), ylim=(0, max(1.0, axes.get_ylim()[1])))
        if axes.lines:
            axes.legend()


def set_rows(axes: "Axes", names: Sequence[str], *, x_max: float) -> None:
    """Name the rows of a plot of success, the first one at the top."""
    axes.set(xlabel="success", xlim=(0, x_max))
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axes.grid(visible=False, axis="y")


def _smoothed(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) < 4 * _WINDOW:
        return points
    windows = [points[max(0, end - _WINDOW) : end] for end in range(1, len(points) + 1)]
    return [(window[-1][0], fmean(y for _, y in window)) for window in windows]


def steps_of(update: Mapping[str, Any]) -> float:
    """Return the environment steps of training until an update."""
    return float(update.get("env_steps", update["step"]))


def _held_out(run: LearnRun) -> list[tuple[float, float]]:
    greedy = [each for each in run.evaluations if each.temperature == 0]
    rates: list[tuple[float, PooledRate]] = [(float(each.env_steps), pooled_rate(by_template(each))) for each in greedy]
    return [(x, found.mean) for x, found in rates if found.mean is not None]
