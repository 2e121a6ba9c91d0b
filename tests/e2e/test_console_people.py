"""People at the console's page in Chromium: they drive from checkpoints, and show tasks that become task files.

Writes pictures to out/console/. Needs Debian's package `chromium`.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Page, expect

from cuaenv.client import AsyncEnvClient, Click, Done, Drag, HumanInControl, Move, TypeText
from envd.api.security.tokens import new_token
from envd.base.config import HypervisorConfig
from envd.base.config_sources import load
from envd.episodes.types import CheckpointCommand
from envd.images.catalogue import Image as GuestImage
from tests.support.console import browser_page, click_screen, drag_screen, paste, wall
from tests.support.daemon import write_tokens
from tests.support.leftovers import machine_leftovers
from tests.support.program import Program, run_program

ENVD = (sys.executable, "-m", "envd")
Act = Callable[[Page], Awaitable[None]]

pytestmark = pytest.mark.long


async def test_a_person_drives_from_a_checkpoint_to_a_score(tmp_path: Path) -> None:
    async with wall(tmp_path, 2) as shown:
        page, service = shown.page, shown.daemon.service
        (episode_id,) = await shown.open(1, run="agent")
        await shown.play(episode_id, Click(379, 311))
        command = CheckpointCommand(request_id="c", episode_id=episode_id, step_index=1, label="before typing")
        await service.checkpoints.create(command)
        await shown.play(episode_id, TypeText("a mistake"), first=1)
        await page.set_viewport_size({"width": 1440, "height": 900})
        await page.goto(f"{shown.url}#episode={episode_id}")
        state = page.locator("#full-checkpoints button")
        await expect(state).to_have_text("step 1before typingdrive from here")
        await shown.picture("checkpoints-wide")
        await state.click()
        await expect(page.locator("#full.controlled")).to_be_visible()
        await expect(page.locator("#full-id")).not_to_have_text(episode_id)
        await page.keyboard.type("Hello, fake desktop!")
        await click_screen(page, 82, 86)
        await expect(page.locator("#full-steps .what").first).to_contain_text("by a person:")
        await shown.picture("drive-wide")
        await page.set_viewport_size({"width": 390, "height": 844})
        await shown.picture("drive-narrow")
        await page.click("#control-score")
        await expect(page.locator("#control-note")).to_have_text("Score 1")
        found = service.find(episode_id)
        assert found is not None
        assert found.progress.step_count == 2


async def recorded(words: Sequence[str], tmp_path: Path, name: str, act: Act, *, setup: Sequence[Any] = ()) -> Path:
    """Show a task in the page of `envd tasks record`; return the file that it writes."""
    setup_file = tmp_path / f"{name}-setup.yaml"
    setup_file.write_text(yaml.safe_dump(list(setup)))
    command = ("tasks", "record", f"shown/{name}", "--instruction", f"Do {name}.", "--setup", str(setup_file))
    with Program(*ENVD, *command, "--out", str(tmp_path), *words) as program:
        url = await asyncio.to_thread(program.wait_for, r"open (http://\S+)", timeout_s=400)
        async with browser_page() as page:
            await page.goto(url)
            await expect(page.locator("#full-image")).to_have_js_property("naturalWidth", 1280)
            await page.click("#control-take")
            await expect(page.locator("#full.controlled")).to_be_visible()
            await act(page)
            await page.click("#control-release")
            await expect(page.locator("#control-note")).to_have_text("Handed back.")
            assert await asyncio.to_thread(program.wait) == 0, program.output
        assert "next: envd tasks verify" in program.output
    return tmp_path / f"shown-{name}.yaml"


async def verified(words: Sequence[str], files: Sequence[Path]) -> str:
    """Return the report of `envd tasks verify`: oracles score 1, doing nothing scores 0."""
    tasks = [word for file in files for word in ("--tasks", str(file))]
    done = await run_program(*ENVD, "tasks", "verify", "shown/", *tasks, *words)
    assert done.status == 0, done.out + done.err
    return done.out


async def _write_a_note(page: Page) -> None:
    await click_screen(page, 379, 311)
    await page.keyboard.type("Buy tea")
    await click_screen(page, 82, 86)


async def _append_a_line(page: Page) -> None:
    await page.keyboard.press("Control+End")
    await page.keyboard.type("eggs")
    await page.keyboard.press("Control+s")


async def _enable(page: Page) -> None:
    await click_screen(page, 822, 167)


LIST = (
    {"kind": "write_file", "path": "/home/user/list.txt", "text": "milk\nbread\n"},
    {"kind": "open", "path": "/home/user/list.txt", "program": "editor"},
)
ITEMS = [
    *("eggs", "butter", "cheese", "flour", "sugar", "salt", "pepper", "rice", "beans", "lentils"),
    *("oats", "honey", "jam", "coffee", "cocoa", "apples", "pears", "plums", "leeks", "onions"),
]


@pytest.mark.timeout(900)
async def test_tasks_are_shown_in_the_page_verified_and_given_variants(tmp_path: Path) -> None:
    words = ("--hypervisor", "fake", "--state-dir", str(tmp_path / "state"))
    files = [
        await recorded(words, tmp_path, "note", _write_a_note),
        await recorded(words, tmp_path, "append", _append_a_line, setup=LIST),
        await recorded(words, tmp_path, "enable", _enable),
    ]
    assert "3 tasks" in await verified(words, files)
    # By hand: the word becomes a parameter.
    text = files[1].read_text()
    assert text.count("eggs") == 2
    marked = json.loads(json.dumps(yaml.safe_load(text)).replace("eggs", "{{item}}"))
    marked["tasks"][0]["parameters"] = {"item": ITEMS}
    files[1].write_text(yaml.safe_dump(marked))
    assert "20 tasks" in await verified(words, files[1:2])


DRAFT = "/home/user/Documents/draft.txt"
TASK = {
    "name": "rewrite",
    "level": 2,
    "instruction": "Replace the first line by: new Wörter here",
    "setup": [
        {"kind": "write_file", "path": DRAFT, "text": "old words\nsecond line\n"},
        {"kind": "open", "path": DRAFT},
    ],
    "checker": {"kind": "file_text", "path": DRAFT, "equals": "new Wörter here\nsecond line\n"},
}
#: Before and behind the first line in the editor.
LINE = ((64, 97), (220, 97))


def real_flags(state_dir: Path, image: GuestImage, template_dir: Path) -> dict[str, object]:
    """Return the settings of a daemon with a real machine."""
    return {
        "hypervisor.uri": HypervisorConfig().uri,
        "hypervisor.template_dir": template_dir,
        "state_dir": state_dir,
        "cache_dir": load().cache_dir,
        "pools.desktop.image": image.name,
    }


async def noted(page: Page, text: str) -> None:
    """Wait until the newest step has an action: then the screen has settled, so the guest has taken the input."""
    await expect(page.locator("#full-steps .what").first).to_contain_text(text)


async def _select_line(page: Page) -> None:
    """Drag over the first line. The guest's editor takes the pointer for a finger: a drag selects from the cursor."""
    await click_screen(page, *LINE[0])
    await noted(page, "click 64,97")
    await drag_screen(page, *LINE)
    await noted(page, "drag 64,97 to 220,97")


@pytest.mark.vm
@pytest.mark.timeout(1800)
async def test_people_and_an_agent_take_turns_on_a_real_machine(
    tmp_path: Path, vm_state_dir: Path, desktop_image: GuestImage, template_dir: Path
) -> None:
    made = {name: new_token(name, scope) for name, scope in (("person", "run"), ("viewer", "read"))}
    tokens, suite = write_tokens(tmp_path, made.values()), tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"suite": "real", "tasks": [TASK]}, allow_unicode=True))
    more = {"security.tokens_file": str(tokens), "tasks.suites": [str(suite)]}
    async with (
        wall(tmp_path, 1, {**real_flags(vm_state_dir, desktop_image, template_dir), **more}) as shown,
        AsyncEnvClient(shown.daemon.address, token=made["person"].secret) as client,
        client.reset("real/rewrite", timeout=timedelta(minutes=10)) as agent,
    ):
        page, browser = shown.page, shown.page.context.browser
        assert browser is not None
        other, viewer = [await (await browser.new_context()).new_page() for _ in range(2)]
        for each, name in ((page, "person"), (other, "person"), (viewer, "viewer")):
            await each.set_viewport_size({"width": 1440, "height": 900})
            await each.goto(f"{shown.url}#episode={agent.episode_id}&token={made[name].secret}")
            await expect(each.locator("#full-image")).to_have_js_property("naturalWidth", 1280)
        # A page without rights watches only.
        await viewer.click("#control-take")
        await expect(viewer.locator("#control-note")).to_contain_text("your token may not control it")
        # Of two pages one controls.
        await page.click("#control-take")
        await expect(page.locator("#full.controlled")).to_be_visible()
        await other.click("#control-take")
        await expect(other.locator("#control-note")).to_contain_text("person controls it")
        # It clicks, drags over the first line, replaces all by typing and pasting, and saves.
        await _select_line(page)
        await shown.picture("real-dragged")
        await page.keyboard.press("Control+a")
        await page.keyboard.type("new ")
        await paste(page, "Wörter")
        await page.keyboard.type(" here\nsecond line\n")
        with pytest.raises(HumanInControl):
            await agent.step(Click(1, 1))
        await page.keyboard.press("Control+s")
        await noted(page, "press ctrl+s")
        await shown.picture("real-wide")
        await page.set_viewport_size({"width": 390, "height": 844})
        await shown.picture("real-narrow")
        await page.click("#control-release")
        await expect(page.locator("#control-note")).to_have_text("Handed back.")
        handover = await agent.handed_back()
        assert Drag(*LINE[0], *LINE[1]) in handover.actions
        assert (await agent.step(Move(600, 500))).step_count == 1
        # A page whose process dies loses control when its lease expires, not before.
        await other.click("#control-take")
        await expect(other.locator("#full.controlled")).to_be_visible()
        with suppress(PlaywrightError):
            await other.goto("chrome://crash")
        await page.click("#control-take")
        await expect(page.locator("#control-note")).to_contain_text("person controls it")
        while not await page.locator("#full.controlled").count():
            await page.click("#control-take")
            await asyncio.sleep(1)
        await page.click("#control-release")
        await expect(page.locator("#control-note")).to_have_text("Handed back.")
        await agent.observe()
        assert (await agent.step(Done())).done
        assert (await agent.evaluate()).score == 1.0
    assert machine_leftovers(vm_state_dir) == []


async def _add_eggs(page: Page) -> None:
    await page.keyboard.press("Control+End")
    await page.keyboard.type("eggs\n")
    await page.keyboard.press("Control+s")
    await noted(page, "press ctrl+s")


async def _rewrite(page: Page) -> None:
    await _select_line(page)
    await paste(page, "new Wörter here")
    await page.keyboard.press("Control+s")
    await noted(page, "press ctrl+s")


@pytest.mark.vm
@pytest.mark.timeout(3000)
async def test_tasks_are_shown_on_a_real_machine_and_verified(
    tmp_path: Path, vm_state_dir: Path, desktop_image: GuestImage
) -> None:
    words = ("--image", desktop_image.name, "--state-dir", str(vm_state_dir))
    setup: Any = TASK["setup"]
    files = [
        await recorded(words, tmp_path, "eggs", _add_eggs, setup=setup),
        await recorded(words, tmp_path, "rewrite", _rewrite, setup=setup),
    ]
    assert "2 tasks" in await verified(words, files)
    # The oracle follows the widgets that were pressed.
    moved = yaml.safe_load(files[1].read_text())
    moved["tasks"][0]["perturb"] = {"kinds": ["window_placement"]}
    files[1].write_text(yaml.safe_dump(moved, allow_unicode=True))
    assert "1 task " in await verified(words, files[1:])
    assert machine_leftovers(vm_state_dir) == []
