"""What setups run in a guest for its Chrome, run here: against a debugging port that answers as Chrome's does, and a
profile's history."""

import asyncio
import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest_asyncio
from aiohttp import web

from envd.tasks.chrome import history_program, tabs_program
from envd.tasks.verbs import Visit


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


async def test_tabs_are_opened_once_the_last_is_shown_and_the_empty_one_goes(chrome: Chrome) -> None:
    urls = ["https://a.example/x?q=1&r=2", "https://kept.example/page/"]
    for _ in range(2):
        assert await run(tabs_program("open", urls, limit_s=5.0, ports=[chrome.port])) == ""
    assert sorted(chrome.tabs.values()) == ["https://a.example/x?q=1&r=2", "https://kept.example/page"]
    assert chrome.active == "https://kept.example/page"


async def test_tabs_are_closed_and_those_that_are_not_open_are_closed_already(chrome: Chrome) -> None:
    urls = ["http://www.kept.example/page", "https://never.example"]
    for _ in range(2):
        assert await run(tabs_program("close", urls, limit_s=5.0, ports=[chrome.port])) == ""
    assert list(chrome.tabs.values()) == ["about:blank"]


async def test_without_a_chrome_that_can_be_told_the_program_says_so() -> None:
    said = await run(tabs_program("open", ["https://a.example"], limit_s=0.01, ports=[1]))
    assert "no Chrome with remote debugging answers on ports (1,)" in said


async def test_visits_are_in_the_history_once_however_often_they_are_put_there(tmp_path: Path) -> None:
    profile = tmp_path / "chromium" / "Default"
    profile.mkdir(parents=True)
    visits = [Visit(url="https://a.example", title="A", age_s=3600), Visit(url="https://b.example")]
    for _ in range(2):
        program = history_program(visits, profiles=[str(tmp_path / "other" / "Default"), str(profile)])
        assert await run(program) == ""
    with closing(sqlite3.connect(profile / "History")) as database:
        rows = database.execute(
            "SELECT urls.url, title, last_visit_time = visit_time, last_visit_time FROM urls"
            " JOIN visits ON visits.url = urls.id ORDER BY urls.url"
        ).fetchall()
        assert database.execute("SELECT count(*) FROM urls").fetchone() == (2,)
    assert [row[:3] for row in rows] == [("https://a.example", "A", 1), ("https://b.example", "", 1)]
    assert 3_590_000_000 < rows[1][3] - rows[0][3] < 3_610_000_000


async def test_a_history_that_chrome_holds_is_told(tmp_path: Path) -> None:
    profile = tmp_path / "Default"
    profile.mkdir()
    [name, flag, program, told] = history_program([Visit(url="https://a.example")], profiles=[str(profile)])
    with closing(sqlite3.connect(profile / "History")) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert "locked" in await run([name, flag, program.replace("timeout=5", "timeout=0.01"), told])


def test_what_is_passed_is_data_and_never_program() -> None:
    argv = tabs_program("open", ["'); import os"], limit_s=1.0)
    assert "import os" not in argv[2].replace("import json, os", "")
    assert json.loads(argv[4]) == ["'); import os"]
