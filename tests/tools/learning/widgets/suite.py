"""Write the tasks of the drawn suite with real widgets: the same forms, instructions and checkers, in windows of GTK.

    python -m tests.tools.learning.widgets.suite --seeds 16 --first 500000 out/widgets.json

Variants with an even seed have GTK's own theme, those with an odd one the colours of the drawn form. Templates that
drag have no counterpart. The oracle clicks where the drawn widgets are.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from envd.drawn.suite import DRAWN
from envd.tasks.templates import Entry, Sampler

_PROGRAM = "/home/user/form.py"
_SOURCE = Path(__file__).with_name("form.py")


def real_tasks(seeds: range) -> Iterator[dict[str, object]]:
    """Yield a task for each seed of each template without chips."""
    for template_id, template in sorted(DRAWN.by_id.items()):
        if not template_id.startswith("drawn/") or "drag" in template_id:
            continue
        for seed in seeds:
            entry = template.build(Sampler(template_id, seed))
            name = f"{template_id.partition('/')[2]}-{seed}"
            yield {"name": name, "level": template.level, **with_windows(entry, "coloured" if seed % 2 else "plain")}


def with_windows(entry: Entry, look: str) -> Entry:
    """Return a task whose forms are windows of GTK."""
    setup: list[object] = [{"kind": "write_file", "path": _PROGRAM, "text": _SOURCE.read_text(encoding="utf-8")}]
    for verb in entry["setup"]:  # type: ignore[attr-defined]
        if verb["kind"] == "launch":
            setup.append({**verb, "argv": ["python3", _PROGRAM, verb["argv"][1], look]})
        else:
            setup.append(verb)
    return {**entry, "setup": setup}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16, help="variants of each template")
    parser.add_argument("--first", type=int, default=500_000, help="first seed; must differ from trained ones")
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    given.path.parent.mkdir(parents=True, exist_ok=True)
    tasks = list(real_tasks(seeds))
    given.path.write_text(json.dumps({"suite": "widgets", "tasks": tasks}), encoding="utf-8")
    print(f"{len(tasks)} tasks in {given.path}")


if __name__ == "__main__":
    main()
