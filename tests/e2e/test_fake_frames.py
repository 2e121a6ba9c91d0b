"""Frame streams over a real socket: exact pixels, no unchanged tile sent again, slow readers block nothing."""

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pytest

from cuaenv import client as wire
from cuaenv.client import Observation
from cuaenv.v1 import env_pb2
from tests.support.callers import connected
from tests.support.faulty import FaultyMachine
from tests.support.server import served_client

COUNT = wire.Click(x=819, y=100)
EXACT = wire.View(cursor="hidden")
ANIMATION = (1256, 776, 16, 16)
TASK = "fake/count-to-five"


def truth(machine: FaultyMachine) -> npt.NDArray[np.uint8]:
    return machine.framebuffer.pixels[:, :, 2::-1]


def used(machines: dict[str, FaultyMachine]) -> FaultyMachine:
    (machine,) = [machine for machine in machines.values() if machine.input_count]
    return machine


async def test_steps_send_only_changes_and_every_pixel_is_exact() -> None:
    async with served_client(size=1) as (server, client), client.reset(TASK, view=EXACT) as episode:
        first = episode.observation
        frames = [first]
        for actions in ([COUNT], [wire.Click(200, 200), wire.TypeText("Ünïcode\nlines")], [wire.Move(5, 5)]):
            frames.append((await episode.step(*actions)).observation)
            assert np.array_equal(frames[-1].rgb_HWC, truth(used(server.hypervisor.machines)))
        assert all(frame.tiles is not None for frame in frames)
        assert frames[0].image_id != frames[1].image_id != frames[2].image_id
        assert frames[3].tiles is frames[2].tiles, "moving a hidden pointer changes no pixel"
        shared = sum(map(lambda one, other: one is other, frames[0].tiles._tiles, frames[1].tiles._tiles))  # type: ignore[union-attr]
        assert shared > 200, "unchanged tiles are not sent again"


async def test_images_need_none_of_the_loops_threads() -> None:
    async def play(address: str) -> wire.StepResult:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))

        def step() -> wire.StepResult:
            return asyncio.run_coroutine_threadsafe(episode.step(COUNT), loop).result(timeout=60)

        async with wire.AsyncEnvClient(address) as client, client.reset(TASK, view=EXACT) as episode:
            return await asyncio.to_thread(step)

    async with served_client(size=1) as (server, _):
        result = await asyncio.to_thread(lambda: asyncio.run(play(server.address)))
    assert result.observation.tiles is not None


async def test_drawn_pointers_and_scaled_views_are_rebuilt_exactly() -> None:
    scaled = wire.View(max_pixel_count=200_000, size_multiple_px=28)
    async with served_client(size=1) as (_, client), client.reset(TASK, view=scaled) as episode:
        for _ in range(3):
            seen = (await episode.step(COUNT)).observation
            assert (seen.width_px % 28, seen.height_px % 28) == (0, 0)
            png = await episode.observe(view=wire.View(encoding="png", max_pixel_count=200_000, size_multiple_px=28))
            assert np.array_equal(seen.rgb_HWC, png.rgb_HWC)
            assert seen.image_id == png.image_id


async def test_the_pointer_can_be_requested_separately_from_the_pixels() -> None:
    view = wire.View(cursor="reported")
    async with served_client(size=1) as (_, client), client.reset(TASK, view=view) as episode:
        assert (await episode.step(wire.Move(321, 234))).observation.cursor == (321, 234)


async def test_the_first_frame_of_a_fork_is_sent_as_a_change_to_its_parents() -> None:
    async with served_client(size=2) as (_, client), client.reset(TASK, view=EXACT) as parent:
        await parent.step(COUNT)
        async with client.fork(parent, count=1) as (child,):
            assert child.observation.tiles is parent.observation.tiles
            await child.step(COUNT)
            assert child.observation.image_id != parent.observation.image_id
            assert (await parent.observe(refresh=True)).image_id == parent.observation.image_id


async def test_a_step_reports_the_changed_regions() -> None:
    view = wire.View(cursor="hidden", grey_difference=True)
    async with served_client(size=1) as (_, client), client.reset(TASK, view=view) as episode:
        before = episode.observation
        change = (await episode.step(COUNT)).screen_change
        after = episode.observation
        assert change is not None
        assert change.base_frame_id == before.frame_id
        differs = (before.rgb_HWC != after.rgb_HWC).any(axis=2)
        assert change.changed_fraction == pytest.approx(differs.mean())
        for x, y, width, height in change.changed_regions:
            differs[y : y + height, x : x + width] = False
        assert not differs.any(), "the regions cover all changes"
        assert change.grey_difference is not None
        assert 0 < change.grey_difference < 0.05
        still = (await episode.step(wire.Wait(timedelta(milliseconds=1)))).screen_change
        assert still is not None
        assert (still.changed_fraction, still.changed_regions, still.grey_difference) == (0.0, (), 0.0)
        plain = await episode.step(COUNT, view=EXACT)
        assert plain.screen_change is None


async def test_moving_regions_are_reported_and_can_be_ignored() -> None:
    # A stall of the event loop for the quiet time would make the screen look settled.
    settle = wire.Settle(quiet=timedelta(seconds=2), max=timedelta(seconds=2))
    async with served_client(size=1) as (server, client), client.reset(TASK, view=EXACT) as episode:
        await episode.step(COUNT)
        used(server.hypervisor.machines).inject(animation_interval_s=0.02)
        seen = (await episode.step(COUNT, settle=settle)).observation
        assert seen.settled is False
        assert ANIMATION in seen.moving
        ignoring = wire.Settle(quiet=timedelta(milliseconds=100), max=timedelta(seconds=60), ignored=[ANIMATION])
        seen = (await episode.step(COUNT, settle=ignoring)).observation
        assert (seen.settled, seen.moving) == (True, ())


async def test_a_new_resolution_during_an_episode_sends_a_full_image() -> None:
    async with served_client(size=1) as (server, client), client.reset(TASK, view=EXACT) as episode:
        await episode.step(COUNT)
        machine = used(server.hypervisor.machines)
        machine.resize_screen(width_px=1024, height_px=768)
        seen = (await episode.step(COUNT)).observation
        assert (seen.width_px, seen.height_px, seen.screen_width_px) == (1024, 768, 1024)
        assert np.array_equal(seen.rgb_HWC, truth(machine))
        again = (await episode.step(wire.Wait(timedelta(milliseconds=1)))).observation
        assert again.tiles is seen.tiles


async def test_an_unknown_base_image_gives_the_full_image() -> None:
    async with served_client(size=1) as (server, client), client.reset(TASK, view=EXACT) as episode:
        options = env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_RAW_ZSTD, known_image_id="e" * 32)
        request = env_pb2.ObserveRequest(episode_id=episode.episode_id, observation=options)
        async with connected(server.address) as stub:
            response = await stub.Observe(request, timeout=60)
        assert response.observation.frame.WhichOneof("content") == "keyframe"


async def test_live_frames_follow_the_screen_until_the_episode_is_closed() -> None:
    async with (
        served_client(size=1) as (server, client),
        client.reset(TASK, view=EXACT) as episode,
        aclosing(episode.frames(max_rate_hz=60)) as frames,
    ):
        assert (await anext(frames)).image_id == episode.observation.image_id
        for _ in range(3):
            upcoming = asyncio.ensure_future(anext(frames))
            await episode.step(COUNT)
            seen = await asyncio.wait_for(upcoming, 60)
            while seen.image_id != episode.observation.image_id:
                seen = await asyncio.wait_for(anext(frames), 60)
            assert np.array_equal(seen.rgb_HWC, truth(used(server.hypervisor.machines)))
        await episode.close()
        assert [frame async for frame in frames] == []


async def test_a_slow_reader_gets_the_newest_frame_and_costs_no_memory() -> None:
    async with (
        served_client(size=1) as (_, client),
        client.reset(TASK, view=EXACT) as episode,
        aclosing(episode.frames(max_rate_hz=60)) as frames,
    ):
        await anext(frames)
        for count in range(20):  # without a read
            await episode.step(COUNT, settle=wire.Settle(quiet=timedelta(0)))
            if count == 10:  # the service keeps no more responses than by now
                gc.collect()
                before = image_count()
        newest = await asyncio.wait_for(anext(frames), 60)
        assert newest.image_id == episode.observation.image_id
        gc.collect()
        assert image_count() <= before + 4


def image_count() -> int:
    return sum(type(thing).__name__ in {"TiledImage", "EncodedFrame"} for thing in gc.get_objects())


async def test_a_cancelled_stream_leaves_nothing_behind() -> None:
    async with served_client(size=1) as (_, client), client.reset(TASK, view=EXACT) as episode:
        for _ in range(5):
            async with aclosing(episode.frames()) as frames:
                seen: Observation = await anext(frames)
                assert seen.width_px == 1280
        async with asyncio.timeout(60):
            while any("frames" in task.get_name() for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)


async def test_several_readers_of_one_screen_each_get_every_change() -> None:
    async with served_client(size=1) as (_, client), client.reset(TASK, view=EXACT) as episode:
        seen: list[set[str]] = [set() for _ in range(4)]

        async def watch(ids: set[str]) -> None:
            async with aclosing(episode.frames(max_rate_hz=60)) as frames:
                async for frame in frames:
                    ids.add(frame.image_id)

        readers = [asyncio.create_task(watch(ids)) for ids in seen]
        for _ in range(5):
            await episode.step(COUNT)
        async with asyncio.timeout(60):
            while not all(episode.observation.image_id in ids for ids in seen):
                await asyncio.sleep(0.01)
        await episode.close()
        await asyncio.wait_for(asyncio.gather(*readers), 60)
