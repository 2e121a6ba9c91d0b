"""A data set for slime's `--prompt-data`: one line for each task that a daemon offers, but for those held out.

```shell
python -m trainer.slime.dataset --host 10.0.0.5:50051 --suite desktop --out tasks.jsonl
```

The prompt is there for slime's logs and length filter; what the model reads is made by `trainer.agent`. What a suite
holds out is left for evaluation; `trainer data prompts` writes both sides, and splits suites that do not say.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from trainer.client import EnvClient, Task


def rows(tasks: Sequence[Task]) -> str:
    """Return tasks to train on as JSON lines, as slime reads them: `--input-key prompt --metadata-key metadata`."""
    return "".join(
        json.dumps(
            {
                "prompt": [{"role": "user", "content": task.instruction}],
                "metadata": {"task_id": task.task_id, "level": task.level, "suite": task.suite},
            },
            ensure_ascii=False,
        )
        + "\n"
        for task in tasks
        if task.split != "held_out"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Ask a daemon for its tasks and write them. Raises: EnvError."""
    parser = argparse.ArgumentParser(prog="python -m trainer.slime.dataset", description="Write tasks for slime.")
    parser.add_argument("--host", required=True, help="HOST:PORT of a daemon; its token is taken from ENVD_TOKEN")
    parser.add_argument("--suite", default="", help="only the tasks of one suite")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    options = parser.parse_args(argv)
    with EnvClient(options.host) as client:
        tasks = client.list_tasks(suite=options.suite)
    lines = rows(tasks)
    options.out.write_text(lines, encoding="utf-8")
    print(f"{options.out}: {lines.count(chr(10))} tasks, {len(tasks) - lines.count(chr(10))} held out")


if __name__ == "__main__":
    main()
