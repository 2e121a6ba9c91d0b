"""The console's page in Chromium, on drawn desktops and on a real machine. Writes pictures to out/console/.

Needs Debian's package `chromium`.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import TimeoutError as BrowserTimeout
from playwright.async_api import expect

from cuaenv.actions import Click, Move, TypeText
from envd.api.security.tokens import new_token
from envd.base.config import HypervisorConfig
from envd.base.config_sources import load
from envd.base.errors import HumanInControl
from envd.episodes.recording.library import Library
from envd.episodes.recording.video import VideoFormat, export_video
from envd.images.catalogue import Image as GuestImage
from tests.support.console import PICTURES, TASKS, click_screen, paste, wall
from tests.support.daemon import write_tokens
from tests.support.leftovers import machine_leftovers

pytestmark = pytest.mark.long


async def test_the_wall_the_full_view_and_the_keys(tmp_path: Path) -> None:
    async with wall(tmp_path, 16) as shown:
        page = shown.page
        await page.goto(shown.url)
        await expect(page.locator("#empty")).to_contain_text("No episodes are open")
        groups = [
            await shown.open(4, run=("grpo-base", "grpo-lr3e-6")[n % 2], task=task) for n, task in enumerate(TASKS)
        ]
        await expect(page.locator(".tile")).to_have_count(16)
        await expect(page.locator(".tile img[src]")).to_have_count(16)
        hostile = "<img src=x onerror=alert(1)>"
        for number, group in enumerate(groups):
            for member, episode_id in enumerate(group):
                await shown.play(
                    episode_id, Click(379, 311), TypeText(f"{hostile} {member}"), Move(300 + 200 * number, 500)
                )
        await shown.daemon.service.evaluate(groups[1][0], request_id="e", fingerprint=b"")
        late = asyncio.create_task(shown.open(8, run="late-run"))
        await expect(page.locator(".pool .why")).to_contain_text("late-run, 8 machines: next: 16 of 16 machines busy")
        await expect(page.locator(f".tile[data-id={groups[1][0]}] .badge")).to_have_text("0.00")
        await expect(page.locator(".tile .pointer:visible")).to_have_count(16)
        await shown.picture("wall-16")
        # Filters.
        await page.keyboard.press("/")
        await page.keyboard.type("enable")
        await expect(page.locator(".tile")).to_have_count(4)
        await page.keyboard.press("Escape")
        await page.select_option("#filter-run", "grpo-lr3e-6")
        await expect(page.locator(".tile")).to_have_count(8)
        await page.select_option("#filter-run", "")
        await expect(page.locator(".tile")).to_have_count(16)
        # The full view, by keys.
        await page.locator(f".tile[data-id={groups[0][0]}]").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#full-id")).to_have_text(groups[0][0])
        await expect(page.locator("#full-steps li")).to_have_count(3)
        await expect(page.locator("#full-steps li .what").nth(1)).to_have_text(f"type '{hostile} 0'")
        await expect(page.locator("#full-tree button")).to_have_count(4)
        await expect(page.locator("#full-tree button[aria-current]")).to_have_text("1step 3")
        await expect(page.locator("#full-image")).to_have_js_property("naturalWidth", 1280)
        await shown.picture("full")
        assert await page.locator("img[src=x]").count() == 0
        await shown.daemon.service.close(groups[0][0])
        await expect(page.locator("#full-note")).to_contain_text("The episode was closed.")
        screen, note = await shown.box("#full-image"), await shown.box("#full-note")
        assert note["y"] >= screen["y"] + screen["height"], "the note covers the picture"
        await page.keyboard.press("Escape")
        await expect(page.locator("#full")).to_be_hidden()
        await expect(page.locator(".tile")).to_have_count(15)
        late.cancel()


async def test_groups_are_framed_and_branches_are_a_tree_with_the_parents_steps(tmp_path: Path) -> None:
    async with wall(tmp_path, 12) as shown:
        page = shown.page
        first, second = await shown.open(2, run="grpo")
        (alone,) = await shown.open(1, run="eval", task=TASKS[1])
        await shown.play(second, Click(379, 311))
        left, right = await shown.fork(second, 1, count=2)
        await shown.play(left, TypeText("left"), first=1)
        (deep,) = await shown.fork(left, 2)
        await page.goto(shown.url)
        await expect(page.locator(".tile")).to_have_count(6)
        await expect(page.locator(".group")).to_have_count(1)
        await expect(page.locator(".group h3")).to_have_text("Group: 2 members, 3 branches")
        assert await page.locator(".group .tile").evaluate_all("tiles => tiles.map((tile) => tile.dataset.id)") == [
            first,
            second,
            left,
            deep,
            right,
        ]
        await expect(page.locator(f".tile[data-id={deep}] .label")).to_have_text("↳ 2.1.1")
        await expect(page.locator(f".tile[data-id={alone}] .label")).to_be_hidden()
        # An address leads to an episode, in a page of its own too.
        await page.goto("about:blank")
        await page.goto(f"{shown.url}#episode={deep}")
        await expect(page.locator("#full-id")).to_have_text(deep)
        await expect(page.locator("#full-tree button[aria-current]")).to_contain_text("2.1.1")
        await expect(page.locator("#full-steps li.inherited .what")).to_have_text(["type 'left'", "click 379,311"])
        await page.set_viewport_size({"width": 1440, "height": 900})
        await shown.picture("branch")
        await page.get_by_role("button", name=left, exact=True).click()
        await expect(page.locator("#full-id")).to_have_text(left)
        assert page.url.endswith(f"#episode={left}")
        await page.go_back()
        await expect(page.locator("#full-id")).to_have_text(deep)
        # Left and right follow the tree, up and down the places.
        await page.keyboard.press("Escape")
        await expect(page.locator(f".tile[data-id={deep}]")).to_be_focused()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator(f".tile[data-id={left}]")).to_be_focused()
        for episode_id in (first, second, left, right, deep):
            await shown.daemon.service.close(episode_id)
        await expect(page.locator(".group")).to_have_count(0)
        await expect(page.locator("#run-rows tr")).to_have_count(2)
        await expect(page.locator("#run-rows tr").last).to_contain_text("grpo")
        await page.locator("#run-rows tr").last.click()
        await expect(page.locator("#empty")).to_have_text("No episode matches the filters.")
        assert page.url.endswith("#run=grpo")
        await page.goto("about:blank")
        await page.goto(f"{shown.url}#episode={deep}")
        await expect(page.locator("#notice")).to_contain_text(f"Episode {deep} is not open here")


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [1440, 390])
async def test_the_page_fits_wide_and_narrow_windows_in_both_themes(tmp_path: Path, scheme: Any, width: int) -> None:
    flags = {"recording.directory": str(tmp_path / "recordings"), "recording.min_free_gib": 0}
    async with wall(tmp_path, 6, flags) as shown:
        page = shown.page
        await page.emulate_media(color_scheme=scheme)
        await page.set_viewport_size({"width": width, "height": 860})
        (episode_id, *_) = await shown.open(4, run="grpo-lr3e-6")
        await shown.play(episode_id, Click(379, 311))
        await page.goto(shown.url)
        await expect(page.locator(".tile img[src]").first).to_be_attached()
        await shown.picture(f"wall-{scheme}-{width}")
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(13, 16, 20)") == (scheme == "dark")
        for address in ("", "#tab=recordings", f"#episode={episode_id}", f"#recording={episode_id}"):
            await page.goto("about:blank")
            await page.goto(shown.url + address)
            await expect(page.locator("#link.live")).to_be_attached()
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, address
        if width == 1440:
            assert (await shown.box("header"))["height"] < 50, "the header has more than one row"


async def test_the_wall_shows_256_episodes_and_loads_the_pictures_in_view(tmp_path: Path) -> None:
    async with wall(tmp_path, 256) as shown:
        page = shown.page
        for number in range(8):
            await shown.open(32, run=f"run-{number}", task=TASKS[number % 4])
        await page.goto(shown.url)
        await expect(page.locator(".tile")).to_have_count(256)
        await expect(page.locator(".tile img[src]").nth(39)).to_be_attached()
        await shown.picture("wall-256")
        assert await page.locator(".tile img[src]").count() < 256
        await page.locator(".tile").last.scroll_into_view_if_needed()
        await expect(page.locator(".tile").last.locator("img[src]")).to_be_attached()


async def test_a_recorded_episode_is_replayed(tmp_path: Path) -> None:
    flags = {"recording.directory": str(tmp_path / "recordings"), "recording.min_free_gib": 0}
    async with wall(tmp_path, 2, flags) as shown:
        page = shown.page
        (episode_id,) = await shown.open(1, run="night-7")
        await shown.play(episode_id, Click(379, 311), TypeText("Hello, fake desktop!"), Click(82, 86), Move(900, 500))
        await shown.daemon.service.evaluate(episode_id, request_id="e", fingerprint=b"")
        await shown.daemon.service.close(episode_id)
        await page.goto(shown.url)
        await page.get_by_role("button", name="Recordings").click()
        await expect(page.locator("#recording-rows tr")).to_have_count(1)
        await page.fill("#filter-text", "nothing")
        await expect(page.locator("#empty")).to_have_text("No recording matches the filters.")
        await page.fill("#filter-text", "night-7")
        await expect(page.locator("#recording-rows tr")).to_have_count(1)
        await shown.picture("recordings")
        await page.get_by_role("button", name="Score").click()
        await expect(page.locator("th[data-sort=score]")).to_have_attribute("aria-sort", "descending")
        assert page.url.endswith("#tab=recordings&text=night-7&sort=-score")
        await expect(page.locator("#recording-count")).to_have_text("1 of 1 recordings")
        # The address of a closed episode leads to its recording.
        await page.goto("about:blank")
        await page.goto(f"{shown.url}#episode={episode_id}")
        await expect(page.locator("#full-steps li")).to_have_count(4)
        assert page.url.endswith(f"#recording={episode_id}")
        await expect(page.locator("#full-image")).to_have_js_property("naturalWidth", 1280)
        await page.locator("#full-steps li").nth(2).click()
        await expect(page.locator("#full-steps li.now .n")).to_have_text("2")
        await shown.picture("replay")
        # Marks by time: also steps that changed nothing have their own.
        places = await page.locator("#marks i").evaluate_all("marks => marks.map((mark) => mark.style.left)")
        assert len(set(places)) == 4
        async with page.expect_download() as download:
            await page.locator("#full-video").click()
        assert (await download.value).suggested_filename == f"{episode_id}.mp4"
        await page.locator("#scrub").fill("0")
        await page.locator("#play").click()
        await expect(page.locator("#full-steps li.now .n")).to_have_text("3")
        await expect(page.locator("#full-score b")).to_have_text("Score 1.00")


async def test_a_person_plays_a_task_to_its_score(tmp_path: Path) -> None:
    async with wall(tmp_path, 2) as shown:
        page = shown.page
        await page.goto(shown.url)
        await page.click("#start-open")
        await page.select_option("#start-task", "fake/save-note")
        await shown.picture("control-start")
        await page.click("#start-form button")
        await expect(page.locator("#full.controlled")).to_be_visible()
        await expect(page.locator("#full-image[src]")).to_be_visible()
        await expect(page.locator("#full-pointer")).to_be_attached()
        await click_screen(page, 379, 311)
        await page.keyboard.type("Hello, fake")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Backspace")
        await paste(page, " desktop!")
        await click_screen(page, 82, 86)
        await shown.picture("control-wide")
        await expect(page.locator("#full-steps .what").first).to_contain_text("by a person:")
        await page.set_viewport_size({"width": 390, "height": 844})
        await shown.picture("control-narrow")
        await page.click("#control-score")
        await expect(page.locator("#control-note")).to_have_text("Score 1")


async def test_of_two_pages_one_controls_and_a_closed_page_hands_back(tmp_path: Path) -> None:
    async with wall(tmp_path, 1) as shown:
        page = shown.page
        (episode_id,) = await shown.open(1, run="agent")
        assert page.context.browser is not None
        other = await page.context.browser.new_page()
        for each in (page, other):
            await each.goto(shown.url)
            await each.locator(f".tile[data-id={episode_id}]").click()
        await page.click("#control-take")
        await expect(page.locator("#full.controlled")).to_be_visible()
        await other.click("#control-take")
        await expect(other.locator("#control-note")).to_contain_text("another page controls it")
        with pytest.raises(HumanInControl):
            await shown.play(episode_id, Click(1, 1))
        await page.close(run_before_unload=False)
        # Until the daemon knows that the page is closed. The button is hidden as soon as a click succeeds.
        while not await other.locator("#full.controlled").count():
            with suppress(BrowserTimeout):
                await other.click("#control-take", timeout=1000)
        await other.click("#control-release")
        await expect(other.locator("#control-note")).to_have_text("Handed back.")
        await shown.play(episode_id, Click(1, 1))


@pytest.mark.vm
@pytest.mark.timeout(1200)
async def test_an_episode_of_a_real_machine_is_watched_recorded_replayed_and_exported(
    tmp_path: Path, vm_state_dir: Path, desktop_image: GuestImage, template_dir: Path
) -> None:
    flags = {
        "hypervisor.uri": HypervisorConfig().uri,
        "hypervisor.template_dir": template_dir,
        "state_dir": vm_state_dir,
        "cache_dir": load().cache_dir,
        "pools.desktop.image": desktop_image.name,
        "recording.directory": str(tmp_path / "recordings"),
        "recording.min_free_gib": 0,
    }
    greeting = "Seen on a real machine"
    async with wall(tmp_path, 1, flags) as shown:
        page = shown.page
        (episode_id,) = await shown.open(1, run="real", task="desktop/type-greeting")
        await page.goto(shown.url)
        await expect(page.locator(".tile img[src]")).to_have_count(1)
        await page.locator(".tile").click()
        await expect(page.locator("#full-image")).to_have_js_property("naturalWidth", 1280)
        before = await page.locator("#full-image").get_attribute("src")
        await shown.play(episode_id, Click(640, 400), TypeText(greeting))
        # The newest step is first.
        await expect(page.locator("#full-steps li .what").nth(0)).to_have_text(f"type '{greeting}'")
        await expect(page.locator("#full-image")).not_to_have_attribute("src", before or "")
        await shown.picture("vm-live")
        await shown.daemon.service.close(episode_id)
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Recordings").click()
        await page.locator("#recording-rows tr").click()
        await expect(page.locator("#full-steps li")).to_have_count(2)
        await page.locator("#full-steps li").nth(1).click()
        await expect(page.locator("#full-steps li.now .n")).to_have_text("1")
        await expect(page.locator("#full-image")).to_have_js_property("naturalWidth", 1280)
        await shown.picture("vm-replay")
    assert machine_leftovers(vm_state_dir) == []
    recording = Library(tmp_path / "recordings").read(episode_id)
    assert len(recording.frames) >= 2
    first, last = recording.image(0).rgb_HWC(), recording.image(len(recording.frames) - 1).rgb_HWC()
    assert (first != last).any()
    formats: tuple[VideoFormat, ...] = ("mp4", "gif")
    for video_format in formats:
        path = PICTURES / f"vm.{video_format}"
        export_video(recording, path, video_format, max_pause_s=1.0)
        assert path.stat().st_size > 10_000


async def test_a_token_is_asked_for_and_a_lost_connection_is_shown(tmp_path: Path) -> None:
    token = new_token("viewer", "read")
    file = write_tokens(tmp_path, [token])
    async with wall(tmp_path, 1, {"security.tokens_file": str(file)}) as shown:
        page = shown.page
        await shown.open(1, run="a")
        await page.goto(shown.url)
        await expect(page.locator("#login-problem")).to_have_text("This daemon asks for a token.")
        await page.fill("#login-token", "wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#login-problem")).to_have_text("The token is not valid.")
        await shown.picture("login")
        await page.fill("#login-token", token.secret)
        await page.keyboard.press("Enter")
        await expect(page.locator(".tile")).to_have_count(1)
        other = await page.context.browser.new_page() if page.context.browser else page
        await other.goto(f"{shown.url}#token={token.secret}")
        await expect(other.locator(".tile")).to_have_count(1)
        assert "token" not in other.url
        # Also in a page that is open already.
        await other.evaluate("sessionStorage.clear()")
        await other.evaluate(f"location.hash = 'token={token.secret}'")
        await other.wait_for_function("sessionStorage.length === 1 && location.hash === ''")
        await expect(other.locator(".tile")).to_have_count(1)
        assert "token" not in other.url
        await page.route("**/api/events", lambda route: route.abort())
        # Again and again: the open stream still brings messages.
        await page.evaluate("window.forgetting = setInterval(() => { lastMessage = 0; }, 100)")
        await expect(page.locator("#banner")).to_contain_text("Connection lost")
        await page.evaluate("clearInterval(forgetting)")
        await shown.picture("lost")
        await page.unroute("**/api/events")
        await expect(page.locator("#banner")).to_be_hidden()


async def test_the_full_view_says_that_the_daemon_is_gone(tmp_path: Path) -> None:
    async with wall(tmp_path, 1) as shown:
        page = shown.page
        await shown.open(1, run="a")
        await page.goto(shown.url)
        await page.locator(".tile").click()
        await page.click("#control-take")
        await expect(page.locator("#control-note")).to_have_text("You control this episode. The agent waits.")
        await page.route("**/api/**", lambda route: route.abort())
        await page.evaluate("setInterval(() => { lastMessage = 0; }, 100)")
        await expect(page.locator("#banner")).to_contain_text("Connection lost")
        await page.locator("#banner").click(trial=True)  # nothing covers it
        await page.evaluate("renewControl()")
        await expect(page.locator("#control-note")).to_have_text("Control has ended: The daemon does not answer.")
        await shown.picture("lost-full")
