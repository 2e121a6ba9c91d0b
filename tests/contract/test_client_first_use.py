"""The client in scripts and notebooks: episodes without a block, help, and errors that say what to do."""

import asyncio
import contextlib
import copy
import gc
import inspect
import traceback
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cuaenv import client as trainer
from cuaenv.client import AsyncEnvClient, Click, EnvClient, EnvError, RetryPolicy, View
from cuaenv.client import opening as client_opening
from cuaenv.client.host import Host
from cuaenv.v1 import env_pb2
from envd.api.server import ApiServer
from envd.base import errors
from envd.base.telemetry.metrics import Metrics
from tests.contract.test_client_hosts import unserved_address
from tests.support.clock import until
from tests.support.stub_episodes import StubEpisodes, pool_info

TASK = "desktop/note"
HURRIED = RetryPolicy(connect_timeout=timedelta(milliseconds=50))


def frames_of(error: BaseException) -> list[str]:
    """Return the functions that a traceback shows below the test's own."""
    shown = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return [frame.name for frame in shown]


# -- without a block --------------------------------------------------------------------------------------------


async def test_an_episode_without_a_block_holds_its_place_until_it_is_closed(
    server: ApiServer, episodes: StubEpisodes
) -> None:
    async with AsyncEnvClient(server.address, max_episodes=1) as client:
        first = await client.open(TASK, view=View(encoding="none"))
        assert (await first.step(Click(1, 2))).errors == ()
        second = asyncio.create_task(client.open(TASK))
        await until(lambda: client.statistics().gated_count == 1)
        assert len(episodes.resets) == 1
        await asyncio.gather(first.close(), first.close())
        await (await asyncio.wait_for(second, 60)).close()
    assert episodes.closed == [first.episode_id, second.result().episode_id]


async def test_closing_a_client_closes_its_episodes_without_a_block(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address) as client:
        episode = await client.open(TASK)
    assert episodes.closed == [episode.episode_id]


async def test_an_episode_without_a_block_is_closed_although_its_closer_is_cancelled(
    server: ApiServer, episodes: StubEpisodes
) -> None:
    async with AsyncEnvClient(server.address, max_episodes=1) as client:
        episode = await client.open(TASK)
        closing = asyncio.create_task(episode.close())
        await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        await (await client.open(TASK)).close()  # the first no longer counts
    assert episode.episode_id in episodes.closed


async def test_an_opening_cancelled_while_its_pictures_are_decoded_leaves_no_episode(
    server: ApiServer, episodes: StubEpisodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = asyncio.Event()

    async def never(*_: object) -> None:
        decoding.set()
        await asyncio.Event().wait()

    async with AsyncEnvClient(server.address, max_episodes=2) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Host, "decode", never)
            opening = asyncio.create_task(client.open_group(TASK, size=2))
            await decoding.wait()
            opening.cancel()
            await asyncio.wait({opening})
        assert (opening.cancelled(), client.episodes) == (True, [])
        group = await asyncio.wait_for(client.open_group(TASK, size=2), 60)  # within `max_episodes`
        await until(lambda: len(episodes.closed) == 2)
    assert len(episodes.closed) == 4
    assert {episode.episode_id for episode in group} == set(episodes.closed[2:])


async def test_callbacks_of_an_episode_are_called_once_it_is_closed(server: ApiServer) -> None:
    called: list[str] = []
    async with AsyncEnvClient(server.address) as client:
        episode = await client.open(TASK)
        episode.when_closed(lambda: called.append("before"))
        assert (called, episode.is_closed) == ([], False)
        episode.begin_close()
        episode.when_closed(lambda: called.append("meanwhile"))
        assert (called, episode.is_closed) == ([], True)
        await episode.close()
        episode.when_closed(lambda: called.append("after"))
        await until(lambda: called == ["before", "meanwhile", "after"])


async def test_a_closed_episode_and_its_pixels_are_freed_without_the_garbage_collector(server: ApiServer) -> None:
    gc.disable()
    try:
        async with AsyncEnvClient(server.address, max_episodes=1) as client:
            episode = await client.open(TASK)
            freed = weakref.ref(episode)
            await episode.close()
            del episode
            await until(lambda: freed() is None)
    finally:
        gc.enable()


async def test_the_synchronous_client_opens_without_a_block(server: ApiServer, episodes: StubEpisodes) -> None:
    def work() -> list[str]:
        client = EnvClient(server.address)
        episode = client.open(TASK, max_steps=3)
        seen = episode.observe(View(encoding="none"), refresh=True)
        assert (seen.data, seen.tiles) == (b"", None)
        episode.close()
        episode.close()
        left_open = client.open(TASK)
        client.close()
        return [episode.episode_id, left_open.episode_id]

    assert await asyncio.to_thread(work) == episodes.closed


async def test_opened_episodes_are_blocks_too(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address) as client, await client.open(TASK) as first:
        assert [episode.episode_id for episode in client.episodes] == [first.episode_id]
        one, other = await client.open_group(TASK, size=2)
        await asyncio.gather(one.close(), other.close())
        assert (one.is_closed, first.is_closed) == (True, False)

    def work() -> list[str]:
        with EnvClient(server.address) as client:
            group = client.open_group(TASK, size=2)
            with client.open(TASK) as third, group as (one, _):
                copies = client.fork(one, count=1)
                copies.close()
            return [episode.episode_id for episode in (*copies, *group, third)]

    # The members of a group are closed together, in any order.
    assert sorted(await asyncio.to_thread(work)) == sorted(episodes.closed[3:])


def test_something_else_than_an_episode_is_not_forked() -> None:
    with EnvClient("127.0.0.1:1") as client, pytest.raises(TypeError, match=r"EnvClient\.fork: parent is .*, not an E"):
        client.fork(cast("Any", "episode"), count=1)


# -- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [AsyncEnvClient, EnvClient])
@pytest.mark.parametrize("name", ["reset", "open", "reset_group", "open_group"])
def test_help_shows_every_option_with_its_type_and_meaning(client: type, name: str) -> None:
    method = getattr(client, name)
    signature = inspect.signature(method)
    options = list(inspect.signature(AsyncEnvClient.reset_group).parameters)
    if "group" not in name:
        options.remove("size")
    assert list(signature.parameters) == options
    assert signature.parameters["timeout"].annotation is timedelta
    documented = inspect.getdoc(method) or ""
    for option in options[1:]:
        assert f"\n    {option}: " in documented
    assert ("\n    size: " in documented) == ("group" in name)
    assert "\nRaises:\n    EnvError: " in documented


async def test_the_synchronous_client_forwards_and_has_statistics(server: ApiServer, episodes: StubEpisodes) -> None:
    def work() -> tuple[int, int]:
        with EnvClient(server.address) as client:
            client.open(TASK)
            (info,) = client.list_episodes()
            with client.forward(info, 9222) as forward:
                assert forward.local_port
            return len(client.statistics().hosts), len(client.list_episodes())

    assert await asyncio.to_thread(work) == (1, 1)
    assert episodes.closed


@pytest.mark.parametrize("name", ["timeout", "lease_ttl"])
async def test_a_number_for_a_length_of_time_is_named(server: ApiServer, name: str) -> None:
    async with AsyncEnvClient(server.address) as client:
        with pytest.raises(TypeError, match=rf"{name} is 3, not a timedelta; pass {name}=timedelta\(seconds=3\)"):
            await client.open(TASK, **{name: 3})  # type: ignore[arg-type]  # What is tested.
        with pytest.raises(TypeError, match=r"timeout is 2\.5, not a timedelta"):
            await client.list_pools(timeout=2.5)  # type: ignore[arg-type]  # What is tested.


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
async def test_a_target_without_a_daemon_fails_at_once_and_says_what_to_do(count: int) -> None:
    with unserved_address() as first, unserved_address() as second:
        async with AsyncEnvClient([first, second][:count], retry=HURRIED) as client, asyncio.timeout(60):
            with pytest.raises(trainer.Unreachable, match=f"start the daemon {first}, or correct the target") as caught:
                async with client.reset(TASK):  # which may take ten minutes
                    pass
    assert isinstance(caught.value, trainer.Unavailable)
    assert "last error" not in str(caught.value)
    assert str(copy.copy(caught.value)) == str(caught.value)  # also in another process


async def test_a_daemon_that_was_reached_is_waited_for(
    episodes: StubEpisodes, caplog: pytest.LogCaptureFixture
) -> None:
    server = ApiServer(episodes, listen="127.0.0.1:0", metrics=Metrics())
    address = await server.start()
    async with AsyncEnvClient(address, retry=RetryPolicy(connect_timeout=timedelta(0))) as client:
        assert await client.list_pools() == []
        await server.stop()
        waiting_call = asyncio.create_task(client.list_pools())
        while "; retrying for" not in caplog.text and not waiting_call.done():
            await asyncio.sleep(0.01)
        again = ApiServer(episodes, listen=address, metrics=Metrics())
        await again.start()
        assert await waiting_call == []
        await again.stop()


async def test_a_full_pool_names_options_of_python(server: ApiServer, episodes: StubEpisodes) -> None:
    episodes.failures = [errors.PoolExhausted("no room; retry with the same request_id", retry_after_s=60.0)]
    async with AsyncEnvClient(server.address) as client:
        with pytest.raises(trainer.PoolExhausted) as caught:
            await client.open(TASK, timeout=timedelta(seconds=5))
    assert str(caught.value).startswith("no room; raise timeout=, limit this client's episodes with max_episodes=")
    assert "request_id" not in str(caught.value)


async def test_something_else_than_an_action_is_refused_by_name(server: ApiServer) -> None:
    async with AsyncEnvClient(server.address) as client, client.reset(TASK) as episode:
        with pytest.raises(TypeError, match=r"'click' is not an action; step takes actions such as Click\(x="):
            await episode.step("click")  # type: ignore[arg-type]


async def test_an_error_shows_few_frames_of_the_client(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address) as client:
        episodes.failures = [errors.TaskNotFound("x")]
        with pytest.raises(EnvError) as refused:
            async with client.reset(TASK):
                pass
        async with client.reset(TASK) as episode:
            episodes.failures = [errors.EpisodeEnded("x")]
            with pytest.raises(EnvError) as ended:
                await episode.step(Click(1, 2))
    for error in (refused.value, ended.value):
        assert len(frames_of(error)) <= 4
        assert (error.__cause__, error.__suppress_context__) == (None, True)


async def test_an_error_of_the_synchronous_client_shows_two_frames(server: ApiServer, episodes: StubEpisodes) -> None:
    def work() -> None:
        with EnvClient(server.address) as client:
            episodes.failures = [errors.TaskNotFound("x")]
            with pytest.raises(EnvError) as refused, client.reset(TASK):
                pass
            assert frames_of(refused.value) == ["reset", "_wait"]
            with client.reset(TASK) as episode:
                episodes.failures = [errors.EpisodeEnded("x")]
                with pytest.raises(EnvError) as ended:
                    episode.step(Click(1, 2))
            assert frames_of(ended.value) == ["call", "_wait"]

    await asyncio.to_thread(work)


# -- waits --------------------------------------------------------------------------------------------------------


async def test_a_reset_that_waits_logs_for_what(
    server: ApiServer, episodes: StubEpisodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_opening, "_INTERVAL_S", 0.02)
    episodes.report_pools(pool_info(4, name="desktop", waiting_count=1))
    episodes.reset_gate.clear()
    async with AsyncEnvClient(server.address) as client:
        opening = asyncio.create_task(client.open(TASK))
        text = f"waiting for pool desktop at {server.address}: preparing the template"
        await until(lambda: text in caplog.text)
        episodes.reset_gate.set()
        await (await opening).close()
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("waits:")] == []


async def test_a_wait_is_logged_when_its_reason_changes_and_every_sixth_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_opening, "_INTERVAL_S", 0)
    problems = iter("aabbaaa")

    async def attempt(*_: Any, **_options: Any) -> env_pb2.ListPoolsResponse:
        problem = next(problems, None)
        if problem is None:
            raise asyncio.CancelledError
        return env_pb2.ListPoolsResponse(pools=[env_pb2.Pool(name="p", waiting_count=1, problem=problem)])

    with pytest.raises(asyncio.CancelledError):
        await client_opening.log_waits(cast("Any", SimpleNamespace(target="host:1", attempt=attempt)))
    assert [record.getMessage()[-1] for record in caplog.records] == ["a", "b", "a"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_a_busy_pool_is_a_warning_once_in_30_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_opening, "_INTERVAL_S", 0)
    counts = iter(range(1, 8))
    caplog.set_level("INFO")

    async def attempt(*_: Any, **_options: Any) -> env_pb2.ListPoolsResponse:
        count = next(counts, None)
        if count is None:
            raise asyncio.CancelledError
        pool = env_pb2.Pool(name="p", waiting_count=count, leased_count=1, capacity_count=1)
        return env_pb2.ListPoolsResponse(pools=[pool])

    with pytest.raises(asyncio.CancelledError):
        await client_opening.log_waits(cast("Any", SimpleNamespace(target="host:1", attempt=attempt)))
    levels = [record.levelname for record in caplog.records if record.name == client_opening.__name__]
    assert levels == ["WARNING", *["INFO"] * 5, "WARNING"]


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (env_pb2.Pool(), ""),
        (env_pb2.Pool(waiting_count=1), "preparing the template"),
        (env_pb2.Pool(waiting_count=1, problem="no KVM"), "preparing the template; no KVM"),
        (env_pb2.Pool(waiting_count=1, template_digest="d"), "starting machines"),
        (
            env_pb2.Pool(waiting_count=3, leased_count=4, capacity_count=4),
            "3 episodes in the queue, 4 of 4 machines busy",
        ),
        (
            env_pb2.Pool(waiting_count=3, leased_count=4, capacity_count=40, resident_count=5),
            "3 episodes in the queue, 4 of 5 machines busy",
        ),
        (env_pb2.Pool(waiting_count=1, leased_count=4, queue=[env_pb2.QueuedGroup(reason="full")]), "full"),
    ],
)
def test_the_reason_of_a_wait(pool: env_pb2.Pool, reason: str) -> None:
    assert client_opening.wait_reason(pool) == reason
