"""Write the tables of docs/evidence/osworld.md from `envd osworld lint`: `python docs/generate_osworld.py`.

The checked-in page was generated with our image and no fetched files, from the newest available task files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from envd.base.config_sources import load
from envd.cli.osworld import examine
from envd.integrations.osworld.files import OsworldFile
from envd.integrations.osworld.lint import FoundObstacle, Obstacle

PAGE = Path(__file__).resolve().parent / "evidence" / "osworld.md"
_BEGIN, _END = "<!-- coverage: made by docs/generate_osworld.py -->", "<!-- coverage ends -->"


def page(text: str, files: Sequence[OsworldFile], found: Mapping[str, Sequence[FoundObstacle]]) -> str:
    """Return the page with new tables."""
    tables = "\n".join([_BEGIN, "", *_coverage(files, found), "", *_runnable(files, found), "", _END])
    return re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: tables, text, flags=re.DOTALL)


def _coverage(files: Sequence[OsworldFile], found: Mapping[str, Sequence[FoundObstacle]]) -> Iterator[str]:
    yield f"| domain | tasks | can run | lack only files | {' | '.join(kind.value for kind in Obstacle)} |"
    yield f"|{'---|' * (len(Obstacle) + 4)}"
    sums = [0] * (len(Obstacle) + 3)
    for name in sorted({f"{file.suite} {file.domain}" for file in files}):
        tasks = [
            {obstacle for obstacle, _ in found[file.task_id]} for file in files if f"{file.suite} {file.domain}" == name
        ]
        counts = [len(tasks), tasks.count(set()), tasks.count({Obstacle.ASSETS})]
        counts += [sum(kind in each for each in tasks) for kind in Obstacle]
        yield f"| {name} | {' | '.join(map(str, counts))} |"
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
    yield f"| all | {' | '.join(map(str, sums))} |"


def _runnable(files: Sequence[OsworldFile], found: Mapping[str, Sequence[FoundObstacle]]) -> Iterator[str]:
    yield "| can run | infeasible | related applications |"
    yield "|---|---|---|"
    for file in files:
        if not found[file.task_id]:
            applications = ", ".join(file.content.get("related_apps") or ())
            yield f"| `{file.task_id}` | {'yes' if file.is_infeasible else ''} | {applications} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), *examine(load())))
