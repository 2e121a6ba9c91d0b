"""A page of the console without a browser, in a process of its own: shows every episode and drops what it receives.

Reads the console's URL and the number of episodes from standard input, and writes a line once it has a picture of each.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp


async def _watch(url: str, episode_count: int) -> None:
    episode_ids: set[str] = set()
    pictured: set[str] = set()
    view = ""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session,
        session.get(f"{url}/api/events") as response,
    ):
        while message := await response.content.readuntil(b"\n\n"):
            name, _, text = message.decode().strip().removeprefix("event: ").partition("\ndata: ")
            data: dict[str, Any] = json.loads(text)
            if name == "hello":
                view = data["view"]
            elif name == "state":
                before = set(episode_ids)
                episode_ids |= {facts["id"] for facts in data["episodes"]}
                episode_ids -= set(data["removed"])
                if episode_ids != before:
                    body = {"tiles": sorted(episode_ids), "full": ""}
                    await session.post(f"{url}/api/views/{view}", json=body)
            elif name == "picture" and len(pictured) < episode_count:
                pictured.add(data["id"])
                if len(pictured) == episode_count:
                    sys.stdout.write("ready\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    _url, _count = sys.stdin.readline().split()
    asyncio.run(_watch(_url, int(_count)))
