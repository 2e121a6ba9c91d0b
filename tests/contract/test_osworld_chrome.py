"""The programs of OSWorld's Chrome verbs, against a stand-in for Chrome's debugging port and a profile's history."""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest_asyncio
from aiohttp import web

from envd.integrations.osworld.worker.chrome import chrome_command, history_command, tabs_command


class Chrome:
    """Tabs behind a debugging port."""

    def __init__(self, *urls: str) -> None:
        self.port = 0
        self.tabs = {str(number): url for number, url in enumerate(urls)}
        self.active = ""
        self._count = len(urls)

    async def answer(self, request: web.Request) -> web.Response:
        match request.method, request.path.split("/")[2:]:
            case "GET", ["list"]:
                pages = [{"id": key, "type": "page", "url": url} for key, url in self.tabs.items()]
                return web.json_response([*pages, {"id": "x", "type": "service_worker", "url": "https://a.example"}])
            case "PUT", ["new"]:
                key = str(self._count)
                self._count += 1
                self.tabs[key] = request.query_string
                return web.json_response({"id": key})
            case "GET", ["close", key]:
                del self.tabs[key]
                return web.Response(text="Target is closing")
            case "GET", ["activate", key]:
                self.active = self.tabs[key]
                return web.Response(text="Target activated")
        raise web.HTTPNotFound


@pytest_asyncio.fixture
async def chrome() -> AsyncIterator[Chrome]:
    chrome = Chrome("about:blank", "https://kept.example/page")
    app = web.Application()
    app.router.add_route("*", "/json/{tail:.*}", chrome.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    chrome.port = runner.addresses[0][1]
    yield chrome
    await runner.cleanup()


async def run(argv: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, *argv[1:], stderr=asyncio.subprocess.PIPE)
    _, stderr = await process.communicate()
    return "" if process.returncode == 0 else stderr.decode()


async def test_tabs_are_opened_once_the_last_is_active_and_an_empty_one_is_closed(chrome: Chrome) -> None:
    urls = ["https://a.example/x?q=1&r=2", "https://kept.example/page/"]
    for _ in range(2):
        assert await run(tabs_command("open", urls, limit_s=5.0, ports=[chrome.port])) == ""
    assert sorted(chrome.tabs.values()) == ["https://a.example/x?q=1&r=2", "https://kept.example/page"]
    assert chrome.active == "https://kept.example/page"


async def test_tabs_are_closed_and_closing_a_missing_tab_succeeds(chrome: Chrome) -> None:
    urls = ["http://www.kept.example/page", "https://never.example"]
    for _ in range(2):
        assert await run(tabs_command("close", urls, limit_s=5.0, ports=[chrome.port])) == ""
    assert list(chrome.tabs.values()) == ["about:blank"]


async def test_an_unreachable_chrome_fails_with_its_ports() -> None:
    stderr = await run(tabs_command("open", ["https://a.example"], limit_s=0.01, ports=[1]))
    assert "no Chrome with remote debugging on ports [1]" in stderr


async def test_visits_written_twice_are_in_the_history_once(tmp_path: Path) -> None:
    profile = tmp_path / "chromium" / "Default"
    profile.mkdir(parents=True)
    visits: list[dict[str, object]] = [
        {"url": "https://a.example", "title": "A", "visit_time_from_now_in_seconds": 3600},
        {"url": "https://b.example"},
    ]
    for _ in range(2):
        program = history_command(visits, profiles=[str(tmp_path / "other" / "Default"), str(profile)])
        assert await run(program) == ""
    with closing(sqlite3.connect(profile / "History")) as database:
        rows = database.execute(
            "SELECT urls.url, title, last_visit_time = visit_time, last_visit_time FROM urls"
            " JOIN visits ON visits.url = urls.id ORDER BY urls.url"
        ).fetchall()
        assert database.execute("SELECT count(*) FROM urls").fetchone() == (2,)
    assert [row[:3] for row in rows] == [("https://a.example", "A", 1), ("https://b.example", "", 1)]
    assert 3_590_000_000 < rows[1][3] - rows[0][3] < 3_610_000_000


async def test_a_history_that_chrome_has_locked_fails(tmp_path: Path) -> None:
    profile = tmp_path / "Default"
    profile.mkdir()
    [name, *flags, program, visits, profiles] = history_command([{"url": "https://a.example"}], profiles=[str(profile)])
    with closing(sqlite3.connect(profile / "History")) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert "locked" in await run([name, *flags, program.replace("timeout=5", "timeout=0.01"), visits, profiles])


def test_urls_are_passed_as_arguments_and_never_as_program_text() -> None:
    url = "'); import os"
    command = chrome_command("chrome_open_tabs", {"urls_to_open": [url]})
    assert command is not None
    assert url not in command[3]
    assert url in command[5]
    assert chrome_command("launch", {"command": ["chromium"]}) is None
