"""A data set for slime's `--prompt-data`: one line for each task that a daemon offers.

```shell
python -m trainer.slime.dataset --host 10.0.0.5:50051 --suite desktop --out tasks.jsonl
```

The prompt is there for slime's logs and length filter; what the model reads is made by `trainer.agent`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from trainer.client import EnvClient, Task


def rows(tasks: Sequence[Task]) -> str:
    """Return tasks as lines of JSON, as slime reads them with `--input-key prompt --metadata-key metadata`."""
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
    options.out.write_text(rows(tasks), encoding="utf-8")
    print(f"{options.out}: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
