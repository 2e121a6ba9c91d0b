"""`envd tasks fetch`: download the files that tasks need into the cache, so that episodes need no network."""

import asyncio
from collections.abc import Sequence

import aiohttp
from rich.text import Text

from cuaenv.cli.terminal import emit_json, out, progress
from envd.cli.terminal import columns
from envd.tasks.assets import AssetCache, AssetMissing, open_http
from envd.tasks.fields import AssetRef

_PARALLEL = 4
#: The largest files of OSWorld's tasks take minutes on a slow network.
_TIMEOUT_S = 1800.0


async def fetch_all(refs: Sequence[AssetRef], cache: AssetCache, *, again: bool = False) -> dict[AssetRef, str]:
    """Fetch missing files, or with `again` all; return the error messages of failures."""
    cache.remove_leftovers()
    failures: dict[AssetRef, str] = {}
    slots = asyncio.Semaphore(_PARALLEL)
    done = 0

    async def fetch(ref: AssetRef, http: aiohttp.ClientSession) -> None:
        nonlocal done
        async with slots:
            try:
                await cache.fetch(ref, http)
            except AssetMissing as error:
                failures[ref] = str(error)
        done += 1
        report(ref.url, done / len(missing))

    missing = [ref for ref in refs if again or not cache.has(ref)]
    with progress("fetching") as report:
        async with open_http(timeout_s=_TIMEOUT_S) as http, asyncio.TaskGroup() as tasks:
            for ref in missing:
                tasks.create_task(fetch(ref, http), name=f"fetch:{ref.url}")
    return failures


def print_fetched(refs: Sequence[AssetRef], failures: dict[AssetRef, str], *, as_json: bool) -> None:
    """Print the number of cached files, and the failures."""
    if as_json:
        problems = [{"url": ref.url, "message": message} for ref, message in failures.items()]
        emit_json({"assets": len(refs), "ready": len(refs) - len(failures), "failures": problems})
        return
    if failures:
        rows = ((ref.url, Text(message.removeprefix(f"{ref.url}: "))) for ref, message in failures.items())
        out.print(columns(("url", "problem"), rows))
    out.print(f"{len(refs) - len(failures)} of {len(refs)} files are in the cache", markup=False)
