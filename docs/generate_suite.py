"""The table of docs/suite.md, from the built-in suite."""

from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.templates import MAX_SEED, split_of


def text() -> str:
    """Return the table: one row per task."""
    catalogue = TaskCatalogue.load()
    rows = ["| task | domain | level | split | variants |", "|---|---|---|---|---|"]
    for task in sorted(catalogue.list(), key=lambda task: (task.domain, task.level, task.task_id)):
        count = catalogue.variant_count(task.task_id)
        variants = "2^31" if count > MAX_SEED else f"{count:,}"
        name = task.task_id.partition("/")[2]
        rows.append(f"| `{name}` | {task.domain} | {task.level} | {split_of(task)} | {variants} |")
    return "\n".join(rows) + "\n"
