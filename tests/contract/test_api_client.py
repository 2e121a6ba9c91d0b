"""The client against the API on a real socket, with stub machines."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from cuaenv import client as trainer
from cuaenv.capabilities import CAPABILITIES
from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    Click,
    Done,
    EnvClient,
    EnvError,
    Episode,
    NotSupported,
    Perturb,
    PressKeys,
    RetryPolicy,
    Settle,
    State,
    TypeText,
    View,
    Wait,
)
from cuaenv.client import errors as errors_of
from cuaenv.client.connection import DaemonConnection
from cuaenv.frames import TiledImage
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.api import convert_requests
from envd.api.server import ApiServer
from envd.base import errors
from envd.base.telemetry.metrics import Metrics
from envd.desktop.observation import CursorMode
from envd.tasks.catalogue import TaskCatalogue
from tests.support.stub_episodes import TASKS, StubEpisodes, pool_info

TASK = "desktop/note"
QUICK = RetryPolicy(attempt_timeout=timedelta(milliseconds=200), first_pause=timedelta(milliseconds=10))


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[AsyncEnvClient]:
    async with AsyncEnvClient(server.address) as client:
        yield client


# -- groups that show a photograph ----------------------------------------------------------------------------------

#: Members whose screens exceed a message if it repeats them: 28 times 3 MB.
PHOTOGRAPH_MEMBERS = 28


@pytest.fixture
def photograph(monkeypatch: pytest.MonkeyPatch) -> TiledImage:
    """Every screen of the stubs: incompressible pixels."""
    rgb_HWC = np.random.default_rng(0).integers(0, 256, (800, 1280, 3), dtype=np.uint8)
    image = TiledImage.from_rgb(rgb_HWC)
    monkeypatch.setattr("tests.support.stubs._black", lambda *_size: image)
    return image


@pytest.mark.parametrize("encoding", ["raw", "png"])
async def test_a_group_and_its_forks_receive_the_image_that_they_share_once(
    client: AsyncEnvClient, photograph: TiledImage, encoding: Literal["raw", "png"]
) -> None:
    async with client.reset_group(TASK, size=PHOTOGRAPH_MEMBERS, view=View(encoding=encoding)) as group:
        images = [member.observation.image_id for member in group]
        assert images == [photograph.image_id] * PHOTOGRAPH_MEMBERS
        first = group[0].observation
        assert all(member.observation.tiles is first.tiles for member in group)
        assert all(member.observation.data is first.data for member in group)
        assert (first.rgb_HWC == photograph.rgb_HWC()).all()
        async with client.fork(group[0], count=PHOTOGRAPH_MEMBERS) as copies:
            assert all((copy.observation.rgb_HWC == first.rgb_HWC).all() for copy in copies)


async def test_a_group_of_a_client_that_cannot_share_images_is_closed_if_its_response_is_too_large(
    server: ApiServer, episodes: StubEpisodes, photograph: TiledImage
) -> None:
    view = env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_RAW_ZSTD)
    request = env_pb2.ResetRequest(request_id="r1", task_id=TASK, group_size=PHOTOGRAPH_MEMBERS, observation=view)
    async with grpc.aio.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = env_pb2_grpc.CUAEnvStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reset(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "28 episodes" in str(caught.value.details())
        assert (await stub.ListEpisodes(env_pb2.ListEpisodesRequest())).episodes == []
        parent = (await stub.Reset(env_pb2.ResetRequest(request_id="r2", task_id=TASK))).episodes[0]
        fork = env_pb2.ForkRequest(
            request_id="f1", episode_id=parent.episode_id, fork_count=PHOTOGRAPH_MEMBERS, observation=view
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Fork(fork)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        left = (await stub.ListEpisodes(env_pb2.ListEpisodesRequest())).episodes
        assert [episode.episode_id for episode in left] == [parent.episode_id]


# -- an episode -------------------------------------------------------------------------------------------------


async def test_an_episode_is_stepped_scored_and_closed(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    async with client.reset(TASK, max_steps=9) as episode:
        assert (episode.instruction, episode.max_steps, episode.state) == (f"Do {TASK}.", 9, State.ACTIVE)
        assert episode.observation.image.size == (1280, 800)
        step = await episode.step(Click(640, 400), TypeText("Hello"), PressKeys(["ctrl", "s"]))
        assert (step.action_errors, step.done, step.step_count, step.observation.settled) == (
            ("", "", ""),
            False,
            1,
            True,
        )
        last = await episode.step(Done())
        assert (last.done, last.state, last.end_reason) == (True, State.TERMINATED, "AGENT_DONE")
        evaluation = await episode.evaluate()
        assert (evaluation.score, evaluation.checks[0].name) == (1.0, "stub")
        assert episodes.closed == []
    assert episodes.closed == [episode.episode_id]
    assert [command.step_index for command in episodes.steps] == [0, 1]
    assert episodes.actions == [Click(640, 400), TypeText("Hello"), PressKeys(("ctrl", "s"))]


async def test_options_of_the_reset_are_the_steps_defaults(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    view = View(encoding="jpeg", max_width_px=32, a11y_tree=True, cursor="hidden")
    settle = Settle(quiet=timedelta(milliseconds=50))
    async with client.reset(TASK, view=view, settle=settle, coordinate_space=(1000, 1000)) as episode:
        first = await episode.step(Click(500, 500))
        second = await episode.step(Click(500, 500), coordinate_space=(1280, 800), view=View(encoding="none"))
    assert first.observation.a11y_tree == "<tree/>"
    assert first.observation.width_px == 32
    assert second.observation.data == b""
    assert episodes.actions == [Click(640, 400), Click(500, 500)]
    assert [command.settle.quiet_ms for command in episodes.steps if command.settle] == [50, 50]
    assert episodes.steps[0].observe.cursor is CursorMode.HIDDEN


async def test_a_step_waits_for_its_actions_and_for_the_service(
    client: AsyncEnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[timedelta] = []
    call = DaemonConnection.call

    async def noted(self: DaemonConnection, method: str, request: Any, timeout: timedelta, **options: Any) -> Any:
        if method == "Step":
            timeouts.append(timeout)
        return await call(self, method, request, timeout, **options)

    monkeypatch.setattr(DaemonConnection, "call", noted)
    async with client.reset(TASK) as episode:
        await episode.step(Click(1, 1))
        await episode.step(*(Wait(timedelta(seconds=60)),) * 4, timeout=timedelta(seconds=10))
        with pytest.raises(TypeError, match="not a timedelta"):
            await episode.step(Click(1, 1), timeout=5)  # type: ignore[arg-type]
    assert timeouts == [timedelta(minutes=3), timedelta(seconds=130)]


async def test_a_group_is_opened_and_closed_together(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    async with client.reset_group(TASK, size=3) as group:
        assert len({episode.group_id for episode in group}) == 1
        await asyncio.gather(*(episode.step(TypeText("x")) for episode in group))
    assert sorted(episodes.closed) == sorted(episode.episode_id for episode in group)
    assert len(group) == 3
    assert len(episodes.resets) == 1


async def test_an_episode_continues_after_its_forks_are_closed(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    view = View(encoding="none")
    async with client.reset(TASK, view=view, coordinate_space=(1000, 1000)) as parent:
        await parent.step(TypeText("x"))
        async with client.fork(parent, count=2, lease_ttl=timedelta(seconds=60)) as copies:
            assert [copy.parent_episode_id for copy in copies] == [parent.episode_id] * 2
            assert {copy.group_id for copy in copies} == {parent.group_id}
            assert {(copy.step_count, copy.instruction) for copy in copies} == {(1, parent.instruction)}
            assert copies[0].origin == copies[1].origin
            assert copies[0].observation.data == b""
            result = await copies[0].step(Click(500, 500))
            assert result.step_count == 2
        assert sorted(episodes.closed) == sorted(copy.episode_id for copy in copies)
        assert (await parent.step(TypeText("y"))).step_count == 2
    [command] = episodes.forks
    assert (command.episode_id, command.step_index, command.fork_count) == (parent.episode_id, 1, 2)
    assert command.lease_ttl_s == 60.0
    assert episodes.actions[1] == Click(640, 400), "the parent's defaults apply"


async def test_a_fork_has_its_parents_instruction_also_if_that_is_empty(client: AsyncEnvClient) -> None:
    async with client.reset(TASK) as episode:
        for instruction in ("", "Write it in French."):
            episode.instruction = instruction
            async with client.fork(episode, count=1) as (copy,):
                assert copy.instruction == instruction


async def test_a_fork_lost_by_the_network_is_performed_once(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address, retry=QUICK) as client, client.reset(TASK) as parent:
        episodes.gate.clear()
        forking = client.fork(parent, count=2)
        opening = asyncio.create_task(forking.__aenter__())
        await episodes.wait_for_call("fork", count=3)
        episodes.gate.set()
        copies = await opening
        assert len(episodes.list_episodes()) == 3
        assert len({command.request_id for command in episodes.forks}) == 1
        await forking.__aexit__(None, None, None)
    assert len(episodes.closed) == 1 + len(copies)


async def test_an_episode_that_cannot_be_forked_is_unchanged(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    async with client.reset(TASK) as parent:
        episodes.failures = [errors.NotForkable("machine m1 has a USB device")]
        with pytest.raises(trainer.NotForkable, match="USB device"):
            async with client.fork(parent, count=1):
                pass
        assert (await parent.step(TypeText("x"))).step_count == 1


async def test_guest_access_and_observation_are_forwarded(client: AsyncEnvClient) -> None:
    async with client.reset(TASK) as episode:
        await episode.write_file("/a", b"\r\n\0")
        assert await episode.read_file("/a") == b"\r\n\0"
        assert (await episode.run_command(["echo", "x"])).stdout == b"echo x"
        seen = await episode.observe(view=View(terminal=True), refresh=True)
        assert (seen.terminal, seen.a11y_tree, episode.observation) == ("$ ", None, seen)


async def test_tasks_and_pools_are_listed(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    episodes.report_pools(pool_info(4, name="debian", idle=3, leased=1))
    assert [task.task_id for task in await client.list_tasks(suite="desktop")] == ["desktop/menu", "desktop/note"]
    named = await client.list_tasks(task_ids=["desktop/note", "desktop/none", *["desktop/menu"] * 1000])
    assert [task.task_id for task in named] == ["desktop/menu", "desktop/note"]
    [pool] = await client.list_pools()
    assert (pool.name, pool.capacity, pool.idle_count, pool.leased_count) == ("debian", 4, 3, 1)


async def test_the_capabilities_are_those_that_all_hosts_have(client: AsyncEnvClient, server: ApiServer) -> None:
    assert await client.capabilities() == set(CAPABILITIES)
    async with older_release({"queue"}) as older, AsyncEnvClient(f"{server.address},{older}") as both:
        assert await both.capabilities() == {"queue"}
    with EnvClient(server.address) as blocking:
        assert "rollback" in await asyncio.to_thread(blocking.capabilities)
        (only,) = await asyncio.to_thread(blocking.list_servers)
        assert (only.host, only.max_machine_count, only.capabilities) == (server.address, None, frozenset(CAPABILITIES))


async def test_a_call_that_an_older_release_does_not_have_says_so() -> None:
    async with older_release(set()) as older, AsyncEnvClient(older) as client:
        assert await client.capabilities() == frozenset()
        for call in (client.list_checkpoints(), client.list_servers(), client.get_episode("e"), client.get_task(TASK)):
            with pytest.raises(NotSupported, match=f"{older}: its release does not know this call; update envd there"):
                await call


async def test_perturbations_that_an_older_release_ignores_are_refused(
    client: AsyncEnvClient, episodes: StubEpisodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client.reset(TASK, perturb=Perturb(seed=1)) as episode:
        assert episode.perturbations
    monkeypatch.setattr(convert_requests, "_perturb", lambda _: None)
    with pytest.raises(NotSupported, match="its release does not know `perturb`"):
        async with client.reset(TASK, perturb=Perturb(seed=1)):
            pytest.fail("the desktop is clean")
    assert len(episodes.closed) == 2


@contextlib.asynccontextmanager
async def older_release(capabilities: set[str]) -> AsyncIterator[str]:
    """Serve a daemon that has only the listings of pools."""

    async def list_pools(request: env_pb2.ListPoolsRequest, context: Any) -> env_pb2.ListPoolsResponse:
        return env_pb2.ListPoolsResponse(capabilities=sorted(capabilities))

    async def watch_pools(
        request: env_pb2.WatchPoolsRequest, context: Any
    ) -> AsyncIterator[env_pb2.WatchPoolsResponse]:
        yield env_pb2.WatchPoolsResponse()
        await asyncio.Event().wait()

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ListPools": grpc.unary_unary_rpc_method_handler(
            list_pools, env_pb2.ListPoolsRequest.FromString, env_pb2.ListPoolsResponse.SerializeToString
        ),
        "WatchPools": grpc.unary_stream_rpc_method_handler(
            watch_pools, env_pb2.WatchPoolsRequest.FromString, env_pb2.WatchPoolsResponse.SerializeToString
        ),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("cuaenv.v1.CUAEnv", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_task_lists_its_obstacles_and_cannot_be_reset_and_a_hidden_task_can() -> None:
    (note, menu, other), machine = TASKS.list(), TASKS.get(TASK).model_copy(update={"task_id": "desktop/machine"})
    known: dict[str, tuple[str, ...]] = {note.task_id: (), menu.task_id: ("internet: its pages are on the live web",)}
    tasks = TaskCatalogue((note, menu, other), hidden=[machine], find_obstacles=known.get)
    async with StubEpisodes(tasks=tasks) as episodes:
        server = ApiServer(episodes, listen="127.0.0.1:0", metrics=Metrics())
        await server.start()
        async with AsyncEnvClient(server.address) as client:
            assert {task.task_id: (task.runnable, task.obstacles) for task in await client.list_tasks()} == {
                "desktop/note": (True, ()),
                "desktop/menu": (False, ("internet: its pages are on the live web",)),
                "other/note": (None, ()),
            }
            with pytest.raises(trainer.SetupFailed, match=r"desktop/menu: .*internet"):
                async with client.reset("desktop/menu"):
                    pass
            async with client.reset("desktop/machine") as episode:
                assert episode.instruction == f"Do {TASK}."
        await server.stop()


# -- closing ----------------------------------------------------------------------------------------------------


async def test_an_episode_is_closed_when_its_block_fails(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.reset(TASK):
            _ = 1 / 0
    assert len(episodes.closed) == 1
    assert episodes.list_episodes() == []


async def test_an_episode_is_closed_when_its_rollout_is_cancelled(
    client: AsyncEnvClient, episodes: StubEpisodes
) -> None:
    episodes.gate.clear()

    async def rollout() -> None:
        async with client.reset(TASK) as episode:
            await episode.step(TypeText("x"))

    task = asyncio.create_task(rollout())
    await episodes.wait_for_call("step")
    [info] = episodes.list_episodes()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert episodes.closed == [info.episode_id]
    episodes.gate.set()


async def test_closing_twice_calls_once(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    async with client.reset(TASK) as episode:
        await asyncio.gather(episode.close(), episode.close())
    assert episodes.calls.count("close") == 1


async def test_a_failed_close_is_left_to_the_lease(
    client: AsyncEnvClient, episodes: StubEpisodes, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.reset(TASK) as episode:
        episodes.failures = [errors.HypervisorError("libvirt refused")]
    assert f"{episode.episode_id}: could not be closed, its lease will end it" in caplog.text


# -- leases -----------------------------------------------------------------------------------------------------


async def test_a_lease_is_renewed_between_calls(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address, keep_alive_interval=timedelta(milliseconds=10)) as client:
        async with client.reset(TASK):
            await episodes.wait_for_call("keep_alive", count=3)
        renewal_count = episodes.calls.count("keep_alive")
        await client.list_pools()
    assert episodes.calls[-1] == "close"
    assert renewal_count >= 3


async def test_a_failed_renewal_is_retried(
    server: ApiServer, episodes: StubEpisodes, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        AsyncEnvClient(server.address, keep_alive_interval=timedelta(milliseconds=10)) as client,
        client.reset(TASK),
    ):
        episodes.failures = [errors.HypervisorError("x")]
        await episodes.wait_for_call("keep_alive", count=2)
    assert "leases not renewed" in caplog.text


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (errors.InvalidRequest("task_id", "x"), trainer.BadRequest, "INVALID_ARGUMENT"),
        (errors.RequestIdReused("x"), trainer.BadRequest, "INVALID_ARGUMENT"),
        (errors.EpisodeNotFound("x"), trainer.EpisodeNotFound, "NOT_FOUND"),
        (errors.TaskNotFound("x"), trainer.TaskNotFound, "NOT_FOUND"),
        (errors.PoolNotFound("x"), trainer.NotFound, "NOT_FOUND"),
        (errors.ImageNotFound("x"), trainer.NotFound, "NOT_FOUND"),
        (errors.EpisodeEnded("x"), trainer.EpisodeEnded, "FAILED_PRECONDITION"),
        (errors.GroupTooLarge("x"), trainer.GroupTooLarge, "FAILED_PRECONDITION"),
        (errors.GuestRefused("x"), trainer.GuestRefused, "FAILED_PRECONDITION"),
        (errors.NotForkable("x"), trainer.NotForkable, "FAILED_PRECONDITION"),
        (errors.StepIndexMismatch("x"), trainer.Conflict, "ABORTED"),
        (errors.AccessDenied("x"), trainer.AccessDenied, "PERMISSION_DENIED"),
        (errors.Unimplemented("x"), trainer.NotSupported, "UNIMPLEMENTED"),
        (errors.PoolExhausted("x", retry_after_s=60.0), trainer.PoolExhausted, "RESOURCE_EXHAUSTED"),
        (errors.PoolFailing("x", retry_after_s=60.0), trainer.Unavailable, "UNAVAILABLE"),
        (errors.Draining("x", retry_after_s=60.0), trainer.Draining, "UNAVAILABLE"),
        (errors.MachineLost("x"), trainer.MachineLost, "DATA_LOSS"),
        (errors.GuestUnresponsive("x"), trainer.GuestFailed, "DATA_LOSS"),
        (errors.GuestError("x"), trainer.GuestFailed, "DATA_LOSS"),
        (errors.SetupFailed("x"), trainer.SetupFailed, "INTERNAL"),
        (errors.EvaluatorFailed("x"), trainer.EvaluatorFailed, "INTERNAL"),
        (errors.HypervisorError("x"), trainer.SampleVoid, "INTERNAL"),
        (ValueError("x"), trainer.SampleVoid, "INTERNAL"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_each_failure_has_its_own_type(
    client: AsyncEnvClient, episodes: StubEpisodes, failure: Exception, kind: type[EnvError], code: str
) -> None:
    episodes.failures = [failure]
    with pytest.raises(EnvError) as caught:
        async with client.reset(TASK, timeout=timedelta(seconds=60)):
            pass
    error = caught.value
    assert type(error) is kind
    assert (error.code, error.metadata["method"]) == (code, "Reset")
    assert error.reason == getattr(failure, "reason", "BUG")
    assert error.field == getattr(failure, "field", "")
    retry_after_s = getattr(failure, "retry_after_s", None)
    assert error.retry_after == (None if retry_after_s is None else timedelta(seconds=retry_after_s))


async def test_an_oversize_message_is_a_bad_request_not_an_exhausted_pool(client: AsyncEnvClient) -> None:
    async with client.reset(TASK) as episode:
        with pytest.raises(trainer.BadRequest):
            await episode.write_file("/a", bytes((64 << 20) + 1))


# -- retries ----------------------------------------------------------------------------------------------------


async def test_a_lost_step_is_retried_under_the_same_id_and_performed_once(
    server: ApiServer, episodes: StubEpisodes
) -> None:
    async with AsyncEnvClient(server.address, retry=QUICK) as client, client.reset(TASK) as episode:
        episodes.gate.clear()
        step = asyncio.create_task(episode.step(TypeText("x")))
        await episodes.wait_for_call("step", count=3)
        episodes.gate.set()
        result = await step
    assert result.step_count == 1
    assert len({command.request_id for command in episodes.steps}) == 1
    assert episodes.actions == [TypeText("x")]


async def test_each_step_has_its_own_id(client: AsyncEnvClient, episodes: StubEpisodes) -> None:
    async with client.reset(TASK) as episode:
        await episode.step(TypeText("x"))
        await episode.step(TypeText("x"))
    assert len({command.request_id for command in episodes.steps}) == 2


async def test_an_exhausted_pool_is_retried_after_its_retry_delay(
    client: AsyncEnvClient, episodes: StubEpisodes
) -> None:
    episodes.failures = [
        errors.PoolExhausted("8 of 8 leased", retry_after_s=0.1),
        errors.Draining("stopping", retry_after_s=0.1),
    ]
    start_s = time.monotonic()
    async with client.reset(TASK):
        waited_s = time.monotonic() - start_s
    assert waited_s >= 0.2
    assert len(episodes.resets) == 3
    assert len({(command.request_id, command.fingerprint) for command in episodes.resets}) == 1


async def test_a_step_that_never_ends_is_abandoned_at_the_deadline(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address, retry=QUICK) as client, client.reset(TASK) as episode:
        episodes.gate.clear()
        with pytest.raises(trainer.DeadlineExceeded):
            await episode.step(TypeText("x"), timeout=timedelta(seconds=0.5))
        episodes.gate.set()


async def test_a_command_is_never_run_twice(server: ApiServer, episodes: StubEpisodes) -> None:
    async with AsyncEnvClient(server.address, retry=QUICK) as client, client.reset(TASK) as episode:
        episodes.failures = [errors.Draining("stopping", retry_after_s=0.01)]
        with pytest.raises(trainer.Draining):
            await episode.run_command(["touch", "/a"])
    assert episodes.calls.count("run_command") == 1


async def test_the_client_waits_for_a_daemon_that_starts_late(episodes: StubEpisodes, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/late"
    server = ApiServer(episodes, listen=address, metrics=Metrics())
    async with AsyncEnvClient(address, retry=QUICK) as client:
        with pytest.raises((trainer.Unavailable, trainer.DeadlineExceeded)):
            await client.list_pools(timeout=timedelta(seconds=1))
        listing = asyncio.create_task(client.list_pools(timeout=timedelta(seconds=60)))
        await server.start()
        assert await listing == []
    await server.stop()


async def test_a_proxy_set_for_other_traffic_is_bypassed(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with AsyncEnvClient(server.address) as client:
        assert await client.list_pools(timeout=timedelta(seconds=60)) == []


# -- loops and threads ------------------------------------------------------------------------------------------


async def test_one_client_serves_several_event_loops(server: ApiServer, client: AsyncEnvClient) -> None:
    async def listed() -> None:
        assert len(await client.list_tasks()) == 3
        await client.aclose()

    await listed()
    await asyncio.to_thread(lambda: asyncio.run(listed()))
    await asyncio.to_thread(lambda: asyncio.run(listed()))
    await listed()


async def test_the_synchronous_client_does_the_same(server: ApiServer, episodes: StubEpisodes) -> None:
    def use() -> None:
        with EnvClient(server.address, run="run-1") as client, client.reset(TASK) as episode:
            assert episode.instruction == f"Do {TASK}."
            step = episode.step(Click(x=640, y=400), TypeText("Hello"), PressKeys(["ctrl", "s"]))
            assert step.observation.image.size == (1280, 800)
            with client.fork(episode, count=2) as copies:
                assert [copy.parent_episode_id for copy in copies] == [episode.episode_id] * 2
                assert copies[1].step(TypeText("x")).step_count == 2
            assert episode.step(Done()).done
            assert (episode.step_count, episode.state) == (2, State.TERMINATED)
            assert episode.evaluate().score == 1.0
            with pytest.raises(trainer.EpisodeEnded):
                episode.step(TypeText("more"))

    await asyncio.to_thread(use)
    assert len(set(episodes.closed)) == len(episodes.closed) == 3
    assert episodes.list_episodes() == []
    assert episodes.resets[0].run == "run-1"


async def test_a_failing_block_of_the_synchronous_client_closes_its_episode_and_thread(
    server: ApiServer, episodes: StubEpisodes
) -> None:
    clients: list[EnvClient] = []

    def use() -> None:
        with contextlib.suppress(ZeroDivisionError), EnvClient(server.address) as client, client.reset(TASK):
            clients.append(client)
            _ = 1 / 0

    await asyncio.to_thread(use)
    assert len(episodes.closed) == 1
    assert episodes.list_episodes() == []
    clients[0].close()
    assert not [thread for thread in threading.enumerate() if thread.name == f"EnvClient:{server.address}"]


async def test_calls_of_a_closed_synchronous_client_raise_client_closed(server: ApiServer) -> None:
    def use() -> None:
        client = EnvClient(server.address)
        episode = client.open(TASK)
        client.close()
        client.close()
        opening = (lambda: client.reset_group(TASK, size=1), lambda: client.open(TASK))
        for call in (client.list_pools, client.statistics, episode.observe, episode.close, *opening):
            with pytest.raises(
                trainer.ClientClosed, match=f"client of {server.address}: it was closed; open another one"
            ):
                call()

    await asyncio.to_thread(use)


@pytest.mark.parametrize(
    ("blocking", "of_asyncio", "only_there"),
    [
        (EnvClient, AsyncEnvClient, {"aclose", "episodes"}),
        (Episode, AsyncEpisode, {"begin_close", "frames", "when_closed"}),
    ],
)
def test_synchronous_calls_have_the_arguments_of_asyncio_ones(
    blocking: type, of_asyncio: type, only_there: set[str]
) -> None:
    internal = {"chosen_view"}
    for name in {name for name in dir(of_asyncio) if not name.startswith("_")} - only_there - internal:
        expected, found = (getattr(kind, name) for kind in (of_asyncio, blocking))
        if callable(expected):
            parameters = [list(inspect.signature(each).parameters.values())[1:] for each in (expected, found)]
            named = [[(each.name, each.kind, each.default) for each in some] for some in parameters]
            assert named[0] == named[1], name


def test_actions_take_positions_first_from_the_start_to_the_end() -> None:
    order = ("start_x", "start_y", "x", "y", "end_x", "end_y")
    found = {kind: list(inspect.signature(kind).parameters) for kind in get_args(trainer.Action)}
    positions = {kind: [name for name in order if name in names] for kind, names in found.items()}
    assert sum(map(bool, positions.values())) == 6
    for kind, names in positions.items():
        assert found[kind][: len(names)] == names
    assert trainer.Drag(1, 2, 3, 4) == trainer.Drag(start_x=1, start_y=2, end_x=3, end_y=4)
    with pytest.raises(TypeError, match="Drag: end_x is None, not an integer"):
        trainer.Drag(1, 2)


async def test_a_synchronous_episode_has_what_an_asyncio_one_documents(server: ApiServer) -> None:
    internal = {"chosen_view", "defaults"}
    of_asyncio = {"begin_close", "frames", "when_closed"}

    def use() -> None:
        with EnvClient(server.address) as client, client.reset(TASK) as episode:
            inner = episode._inner
            names = {name for name in {*vars(inner), *dir(type(inner))} if not name.startswith("_")}
            names -= internal | of_asyncio
            assert names == {name for name in dir(episode) if not name.startswith("_")}
            shared = {name for name in names if not callable(getattr(inner, name))}
            assert {name: getattr(episode, name) for name in shared} == {name: getattr(inner, name) for name in shared}
            assert client.targets == client._inner.targets
            assert episode.host.target == server.address
            assert repr(episode).startswith("<Episode ")

    await asyncio.to_thread(use)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("INVALID_ARGUMENT", "NEW_RULE", trainer.BadRequest),
        ("FAILED_PRECONDITION", "NEW_STATE", trainer.Refused),
        ("PERMISSION_DENIED", "NEW_RIGHT", trainer.AccessDenied),
        ("UNAUTHENTICATED", "NEW_TOKEN", trainer.Unauthenticated),
        ("UNIMPLEMENTED", "NEW_SETTING", trainer.NotSupported),
        ("UNAVAILABLE", "NEW_FAILURE", trainer.Unavailable),
        ("DEADLINE_EXCEEDED", "", trainer.DeadlineExceeded),
        ("DATA_LOSS", "NEW_LOSS", trainer.SampleVoid),
        ("UNKNOWN", "", trainer.SampleVoid),
        ("RESOURCE_EXHAUSTED", "NEW_QUOTA", trainer.Exhausted),
        ("RESOURCE_EXHAUSTED", "", trainer.BadRequest),
        ("ABORTED", "NEW_CONFLICT", trainer.Conflict),
        ("NOT_FOUND", "NEW_THING_NOT_FOUND", trainer.NotFound),
        ("INTERNAL", "NEW_FAULT", trainer.SampleVoid),
    ],
)
def test_an_unknown_reason_becomes_the_class_of_its_code(code: str, reason: str, kind: type[trainer.EnvError]) -> None:
    status = status_pb2.Status(code=grpc.StatusCode[code].value[0], message="x")
    if reason:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason))
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    failure = grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), trailing, "x")
    error = errors_of.error_of(failure, host="h")
    assert (type(error), error.reason) == (kind, reason)
