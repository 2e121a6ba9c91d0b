"""The console's page in Chromium, and a daemon that serves it."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright, expect

from envd.daemon.composition import Daemon, open_daemon
from tests.support.daemon import WITH_CONSOLE, ConsoleDaemon, fake_config

PICTURES = Path(__file__).parents[2] / "out" / "console"
#: A page that waits for longer hangs.
PATIENCE_MS = 120_000
TASKS = ("fake/save-note", "fake/count-to-five", "fake/enable", "fake/close-controls")


class Wall(ConsoleDaemon):
    """A daemon with a console, and a page that shows it."""

    def __init__(self, daemon: Daemon, page: Page) -> None:
        super().__init__(daemon)
        self.page = page

    async def play(self, episode_id: str, *actions: Any, first: int = 0) -> None:
        """Perform each action as a step."""
        for index, action in enumerate(actions, first):
            await self.step(episode_id, index, action)

    async def box(self, selector: str) -> Any:
        """Return the place of an element on the page."""
        box = await self.page.locator(selector).bounding_box()
        assert box is not None, selector
        return box

    async def picture(self, name: str) -> None:
        """Write a picture of the page."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=PICTURES / f"{name}.png")


@asynccontextmanager
async def wall(tmp_path: Path, size: int, flags: Mapping[str, object] | None = None) -> AsyncIterator[Wall]:
    """Serve drawn desktops with a console and open an empty page; fails if the page logs an error."""
    config = fake_config(
        tmp_path, {**WITH_CONSOLE, "pools": {"desktop": {"size": size, "capacity": size}}, **(flags or {})}
    )
    async with open_daemon(config) as daemon, browser_page() as page:
        yield Wall(daemon, page)


@asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """Open an empty page in a browser of its own; fails if a script of the page fails."""
    problems: list[str] = []
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        try:
            page = await browser.new_page(viewport={"width": 1600, "height": 1000})
            page.set_default_timeout(PATIENCE_MS)
            expect.set_options(timeout=PATIENCE_MS)
            page.on("pageerror", lambda error: problems.append(str(error)))
            yield page
        finally:
            await browser.close()
    assert problems == []


async def place_of(page: Page, x: int, y: int, *, screen: tuple[int, int] = (1280, 800)) -> tuple[float, float]:
    """Return where a place of the guest's screen is in the full view."""
    box = await page.locator("#full-image").bounding_box()
    assert box is not None
    return box["x"] + (x + 0.5) * box["width"] / screen[0], box["y"] + (y + 0.5) * box["height"] / screen[1]


async def click_screen(page: Page, x: int, y: int) -> None:
    """Click at a place of the guest's screen."""
    await page.mouse.click(*await place_of(page, x, y))


async def drag_screen(page: Page, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Drag from a place of the guest's screen to another."""
    await page.mouse.move(*await place_of(page, *start))
    await page.mouse.down()
    await page.mouse.move(*await place_of(page, *end), steps=8)
    await page.mouse.up()


async def paste(page: Page, text: str) -> None:
    """Paste a text into the field that receives the keyboard."""
    await page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.setData("text/plain", text);
            document.activeElement.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, cancelable: true}));
        }""",
        text,
    )
