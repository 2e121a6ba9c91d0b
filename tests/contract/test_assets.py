"""The asset cache: files are fetched once, verified, stored read-only, and copied into guests without the server."""

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from envd.base.errors import SetupFailed
from envd.tasks import assets
from envd.tasks.assets import AssetCache, AssetMissing, open_http
from envd.tasks.fields import AssetRef
from envd.tasks.model import Task
from envd.tasks.setup import run_setup
from envd.tasks.setup_resources import SetupResources
from tests.support.memory_desktop import MemoryDesktop

DATA = bytes(range(256)) * 100
DIGEST = hashlib.sha256(DATA).hexdigest()
PATH = "/home/user/a.bin"


class Site:
    """A web server with one file."""

    def __init__(self) -> None:
        self.url = ""
        self.data = DATA
        self.request_count = 0
        self.on_request: Callable[[], None] = lambda: None

    async def answer(self, _request: web.Request) -> web.Response:
        self.request_count += 1
        self.on_request()
        return web.Response(body=self.data)

    async def redirect(self, request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    app = web.Application()
    app.router.add_get("/a.bin", site.answer)
    app.router.add_get("/moved", site.redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}/a.bin"
    yield site
    await runner.cleanup()


@pytest.fixture
def cache(tmp_path: Path) -> AssetCache:
    return AssetCache(tmp_path / "assets")


async def fetch(cache: AssetCache, ref: AssetRef) -> None:
    async with open_http(timeout_s=10.0) as http:
        await cache.fetch(ref, http)


def task_with(url: str, **fields: Any) -> Task:
    verb = {"kind": "download", "files": [{"url": url, "path": PATH, **fields}]}
    return Task.model_validate({"task_id": "s/t", "instruction": "i", "level": 1, "infeasible": True, "setup": [verb]})


def files_in(cache: AssetCache) -> list[Path]:
    return [path for path in cache.directory.rglob("*") if path.is_file()]


async def test_a_fetched_file_is_copied_into_the_guest_without_its_server(site: Site, cache: AssetCache) -> None:
    task = task_with(site.url, sha256=DIGEST)
    [ref] = task.downloads()
    await fetch(cache, ref)
    site.data = b"gone"
    desktop = MemoryDesktop()
    await run_setup(task, desktop, timeout_s=60.0, resources=SetupResources(assets=cache))
    assert desktop.files[PATH] == DATA
    assert site.request_count == 1
    assert all(path.stat().st_mode & 0o222 == 0 for path in files_in(cache))


async def test_a_file_with_another_digest_is_not_kept(site: Site, cache: AssetCache) -> None:
    with pytest.raises(AssetMissing, match=f"sha256 is {DIGEST}, the task needs {'0' * 64}"):
        await fetch(cache, AssetRef(site.url, "0" * 64))
    assert files_in(cache) == []


async def test_a_cached_file_with_the_wrong_digest_counts_as_missing(site: Site, cache: AssetCache) -> None:
    await fetch(cache, AssetRef(site.url))
    assert cache.has(AssetRef(site.url, DIGEST))
    with pytest.raises(AssetMissing, match=f"the cache has sha256 {DIGEST}"):
        cache.find(AssetRef(site.url, "0" * 64))


async def test_a_cached_file_with_changed_content_is_not_used(site: Site, cache: AssetCache) -> None:
    ref = AssetRef(site.url)
    await fetch(cache, ref)
    path = cache.find(ref)
    path.chmod(0o644)
    path.write_bytes(b"poison")
    with pytest.raises(AssetMissing, match="changed"):
        cache.read(ref)


async def test_a_file_beyond_the_limit_is_cut_off(site: Site, tmp_path: Path) -> None:
    cache = AssetCache(tmp_path / "assets", max_bytes=len(DATA) - 1)
    with pytest.raises(AssetMissing, match="larger"):
        await fetch(cache, AssetRef(site.url))
    assert files_in(cache) == []


async def test_a_failed_download_leaves_the_cache_unchanged(site: Site, cache: AssetCache) -> None:
    await fetch(cache, AssetRef(site.url))
    with pytest.raises(AssetMissing, match="404"):
        await fetch(cache, AssetRef(f"{site.url}x"))
    assert cache.read(AssetRef(site.url)) == DATA


@pytest.mark.parametrize("host", ["localhost", "127.1", "[::ffff:127.0.0.1]"])
async def test_a_redirect_to_a_private_address_is_refused(host: str, site: Site, cache: AssetCache) -> None:
    ref = AssetRef(f"{site.url.replace('a.bin', 'moved')}?to={site.url.replace('127.0.0.1', host)}", DIGEST)
    with pytest.raises(AssetMissing, match="is not public"):
        await fetch(cache, ref)
    assert site.request_count == 0
    assert not cache.has(ref)


async def test_a_redirect_to_the_same_host_or_a_public_one_is_followed(
    site: Site, cache: AssetCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = site.url.replace("a.bin", "moved")
    await fetch(cache, AssetRef(f"{moved}?to=/a.bin", DIGEST))
    monkeypatch.setattr(assets, "is_public", lambda _: True)
    await fetch(cache, AssetRef(f"{moved}?to={site.url.replace('127.0.0.1', 'localhost')}", DIGEST))
    assert site.request_count == 2


async def test_an_episode_downloads_only_if_allowed(site: Site, cache: AssetCache) -> None:
    task, desktop = task_with(site.url), MemoryDesktop()
    with pytest.raises(SetupFailed, match="envd tasks fetch"):
        await run_setup(task, desktop, timeout_s=60.0, resources=SetupResources(assets=cache))
    assert site.request_count == 0
    for _ in range(2):
        await run_setup(task, desktop, timeout_s=60.0, resources=SetupResources(assets=cache, allow_download=True))
    assert desktop.files[PATH] == DATA
    assert site.request_count == 1


def test_the_assets_of_an_evaluator_are_listed() -> None:
    evaluator = {
        "kind": "osworld",
        "func": ["compare_table", "compare_text_file"],
        "expected": [
            {"type": "cloud_file", "path": "https://files.example.org/gold.xlsx", "dest": "gold.xlsx"},
            {
                "type": "cloud_file",
                "path": ["https://files.example.org/a", "https://files.example.org/b"],
                "dest": ["a", "b"],
            },
        ],
    }
    fields = {"task_id": "s/t", "instruction": "i", "level": 1, "checker": {"kind": "any", "checks": [evaluator]}}
    names = [ref.url.rpartition("/")[2] for ref in Task.model_validate(fields).downloads()]
    assert names == ["gold.xlsx", "a", "b"]


def test_a_malformed_cache_entry_counts_as_missing(cache: AssetCache) -> None:
    ref = AssetRef("https://files.example.org/a")
    name = cache.directory / "url" / f"{hashlib.sha256(ref.url.encode()).hexdigest()}.json"
    name.parent.mkdir(parents=True)
    for text in ("", "[]", "{}", json.dumps({"sha256": "../../etc/passwd"})):
        name.write_text(text)
        with pytest.raises(AssetMissing, match="envd tasks fetch"):
            cache.read(ref)


async def test_parts_of_a_killed_download_are_removed_by_the_next_one(site: Site, cache: AssetCache) -> None:
    await fetch(cache, AssetRef(site.url))
    before = files_in(cache)
    for directory in ("sha256", "url"):
        (cache.directory / directory / ".part-killed").write_bytes(DATA)
        (cache.directory / directory / ".part-killed.complete").write_bytes(DATA)
    await fetch(cache, AssetRef(site.url))
    assert files_in(cache) == before


async def test_parts_of_a_running_download_are_not_removed(site: Site, cache: AssetCache) -> None:
    site.on_request = AssetCache(cache.directory).remove_leftovers
    await fetch(cache, AssetRef(site.url, DIGEST))
    assert cache.has(AssetRef(site.url, DIGEST))
