"""Play many tasks at once, with progress. Scores are appended to a file, and a second start skips what it holds."""

import asyncio
import json
import os
import sys
from pathlib import Path

from cuaenv.client import AsyncEnvClient, Done, EnvError

ADDRESS = os.environ.get("ENVD_TARGET", "127.0.0.1:50051")
RESULTS = Path("results.jsonl")
AT_ONCE = 4


async def play(client: AsyncEnvClient, task_id: str) -> dict[str, object]:
    """Play one task. A failure of the service is a result without a score, never a score of 0."""
    try:
        async with client.reset(task_id) as episode:
            await episode.step(Done())  # your agent's steps
            return {"task": task_id, "score": (await episode.evaluate()).score}
    except EnvError as error:
        return {"task": task_id, "error": str(error)}


def save(row: dict[str, object]) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


async def main() -> None:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    finished = {row["task"] for row in map(json.loads, lines) if "score" in row}
    async with AsyncEnvClient(ADDRESS, max_episodes=AT_ONCE) as client:
        wanted = [task.task_id for task in await client.list_tasks() if task.task_id.startswith("fake/")]
        todo = [task_id for task_id in wanted if task_id not in finished]
        for count, playing in enumerate(asyncio.as_completed([play(client, task_id) for task_id in todo]), 1):
            save(await playing)
            print(f"\r{len(finished) + count} of {len(wanted)}", end="", file=sys.stderr)
    print(file=sys.stderr)


asyncio.run(main())
