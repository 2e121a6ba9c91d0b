"""Accessibility trees of drawn desktops, from the guest's service to the client, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from cuaenv import client as wire
from cuaenv.client import AsyncEpisode
from tests.support.server import served_client

FULL = wire.View(cursor="hidden", a11y_tree=True, a11y_elements=True)
MARKED = wire.View(cursor="hidden", a11y_tree=True, marks=True)


@asynccontextmanager
async def desktop(view: wire.View = FULL) -> AsyncIterator[AsyncEpisode]:
    async with served_client(size=2) as (_, client), client.reset("fake/save-note", view=view) as episode:
        yield episode


async def test_a_click_in_the_middle_of_a_box_hits_the_element() -> None:
    async with desktop() as episode:
        seen = episode.observation
        [button] = [element for element in seen.a11y_elements or () if element.name == "Count"]
        x, y = button.box[0] + button.box[2] // 2, button.box[1] + button.box[3] // 2
        assert seen.element_at(x, y) == button
        after = (await episode.step(wire.Click(x, y))).observation
        assert 'value="Clicks: 1"' in (after.a11y_tree or "")


async def test_members_of_a_group_see_the_same_marks() -> None:
    async with (
        served_client(size=2) as (_, client),
        client.reset_group("fake/save-note", size=2, view=MARKED) as (one, other),
    ):
        first = one.observation
        assert first.a11y_tree == other.observation.a11y_tree
        assert first.image_id == other.observation.image_id
        plain = await one.observe(view=wire.View(cursor="hidden"))
        assert first.frame_id == plain.frame_id
        assert (first.rgb_HWC != plain.rgb_HWC).any()
        assert np.array_equal((await one.observe()).rgb_HWC, first.rgb_HWC)


async def test_an_outline_respects_the_requested_length() -> None:
    async with desktop() as episode:
        whole = episode.observation.a11y_tree or ""
        short = (await episode.observe(view=wire.View(a11y_tree=True, a11y_max_chars=200))).a11y_tree or ""
        assert len(short) <= 200 < len(whole)
        assert short.splitlines()[-1].endswith(" more")
        with pytest.raises(wire.BadRequest, match="a11y_max_chars"):
            await episode.observe(view=wire.View(a11y_tree=True, a11y_max_chars=10))


async def test_osworlds_agents_get_the_tree_in_osworlds_format() -> None:
    async with desktop() as episode:
        seen = await episode.observe(view=wire.View(a11y_tree=True, a11y_format="osworld_xml"))
        assert (seen.a11y_tree or "").startswith("<desktop-frame")
        assert seen.a11y_elements is None


async def test_a_stream_of_frames_has_pixels_only() -> None:
    async with desktop(MARKED) as episode:
        frames = episode.frames()
        assert (await anext(frames)).a11y_elements is None
        await frames.aclose()
