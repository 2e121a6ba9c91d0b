"""The report of a soak: its work, and the figures that must be zero."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.soak.accounting import Accounting

_MAX_LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """One soak."""

    conditions: Mapping[str, object]
    """The host, the machines, the seed and the duration."""
    accounting: Accounting
    """Accounting of the finished soak."""
    longest_stall_s: float
    """Longest lag of the event loop while clients played. The fake guests and the accounting run in the same loop."""
    leftovers: Sequence[str]
    """Episodes, machines, files and tasks that still exist."""

    @property
    def counts(self) -> dict[str, int]:
        """How much was done."""
        return {
            "episodes": len(self.accounting.episodes),
            "steps": self.accounting.step_count,
            "forks": self.accounting.fork_count,
            "checkpoints": self.accounting.checkpoint_count,
            "rollbacks": self.accounting.rollback_count,
            "counters_read": self.accounting.counted_count,
            "scores": self.accounting.scored_count,
            "client_kills": self.accounting.client_kill_count,
            "missed_after_stall": self.accounting.stalled_count,
        }

    @property
    def must_be_zero(self) -> dict[str, int]:
        """The figures that must be zero for the soak to pass."""
        return {
            "duplicated_actions": self.accounting.duplicated_count,
            "lost_actions": self.accounting.lost_count,
            "fake_zero_rewards": len(self.accounting.fake_rewards),
            "leftovers": len(self.leftovers),
            "unexplained_errors": len(self.accounting.unexplained()),
        }

    @property
    def passed(self) -> bool:
        """Whether all of `must_be_zero` are zero."""
        return not any(self.must_be_zero.values())

    def as_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        faults = self.accounting.fault_counts()
        return {
            "passed": self.passed,
            **self.counts,
            **self.must_be_zero,
            "longest_stall_ms": round(self.longest_stall_s * 1000),
            "faults": {"total": sum(faults.values()), "hostile_guests": self.accounting.hostile_count, **faults},
            "problems": {
                "actions": self.accounting.problems[:_MAX_LISTED],
                "rewards": self.accounting.fake_rewards[:_MAX_LISTED],
                "leftovers": self.leftovers[:_MAX_LISTED],
            },
            "unexplained": self.accounting.unexplained()[:_MAX_LISTED],
            "outcomes": self.accounting.error_counts(),
            "conditions": dict(self.conditions),
        }

    def print(self, console: Console) -> None:
        """Print the report as a table."""
        for name, value in self.conditions.items():
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
        table = Table(box=None, pad_edge=False, show_header=False)
        faults = {f"fault {kind}": count for kind, count in self.accounting.fault_counts().items()}
        for name, count in {**self.counts, "hostile_guests": self.accounting.hostile_count, **faults}.items():
            table.add_row(name, f"{count:,}")
        table.add_row("longest_stall_ms", f"{self.longest_stall_s * 1000:,.0f}")
        for name, count in self.must_be_zero.items():
            table.add_row(name, f"[{'bold red' if count else 'green'}]{count}[/]")
        console.print(table)
        accounting = self.accounting
        problems = [*accounting.problems, *accounting.fake_rewards, *self.leftovers, *accounting.unexplained()]
        for problem in problems[:_MAX_LISTED]:
            console.print(f"[bold red]wrong:[/] {escape(problem)}", soft_wrap=True)
