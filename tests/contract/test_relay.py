"""Two shards in this process, on real sockets: what a client of either sees is one daemon.

Real shards share a port. Here each has its own, so that a test chooses which calls are relayed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cuaenv.actions import Click
from cuaenv.client import AsyncEnvClient, BadRequest, GroupTooLarge
from cuaenv.client.credentials import Access
from cuaenv.v1 import env_pb2, env_pb2_grpc
from cuaenv.wire import RELAYED_KEY
from google.protobuf.duration_pb2 import Duration

from envd.api.relay import servicer
from envd.api.relay.endpoint import EndpointServicer
from envd.api.relay.link import RelayChannel, ShardLink
from envd.api.relay.merge import shard_of
from envd.api.relay.placements import Placements
from envd.api.relay.servicer import RelayServicer
from envd.api.security.access import NO_QUEUE_HEADER
from envd.api.security.tokens import new_token
from envd.api.server import ApiServer
from envd.base.aio import Changes, race
from envd.base.config import SecurityConfig
from envd.base.telemetry.metrics import Metrics
from envd.daemon.shards.layout import INNER_SECURITY
from envd.hypervisor.fake.faults import Faults
from tests.support.server import FakeServer, serve_fake

TASK = "fake/count-to-five"
COUNT = Click(819, 100)
STEPS_MEASURED = ("envd_rpc_duration_seconds_count", {"method": "Step", "code": "OK"})


@dataclass(kw_only=True)
class Sharded:
    """A supervisor's server and its shards."""

    addresses: Sequence[str]
    """Addresses of each shard, for clients."""
    endpoints: Sequence[ApiServer]
    links: Sequence[ShardLink]
    shards: Sequence[FakeServer]
    placements: Placements
    supervisor: ApiServer

    @property
    def address(self) -> str:
        """Address of shard 0, for clients."""
        return self.addresses[0]


@asynccontextmanager
async def serve_shards(
    directory: Path,
    *,
    size: int = 1,
    count: int = 2,
    security: SecurityConfig | None = None,
    faults: Faults | None = None,
) -> AsyncIterator[Sharded]:
    """Serve `count` shards of `size` machines."""
    changes = Changes()
    async with AsyncExitStack() as stack:
        shards, links = [], []
        supervisor_target = f"unix:{directory}/supervisor.sock"
        for index in range(count):
            listen = f"unix:{directory}/{index}.sock"
            shards.append(
                await stack.enter_async_context(
                    serve_fake(
                        size=size,
                        capacity=size,
                        listen=listen,
                        faults=faults,
                        shard=index,
                    )
                )
            )
            links.append(ShardLink(index, listen, on_change=changes.notify))
            await links[-1].connect()
            stack.push_async_callback(links[-1].disconnect)
        placements = Placements(directory / "placements")
        stack.callback(placements.close)
        relay = RelayServicer(links, placements, changes=changes)
        supervisor = ApiServer(
            relay, listen=supervisor_target, metrics=Metrics(), security=INNER_SECURITY, is_inner=True
        )
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        endpoints, addresses = [], []
        for index, shard in enumerate(shards):
            to_supervisor = RelayChannel(supervisor_target)
            stack.push_async_callback(to_supervisor.aclose)
            servicer = EndpointServicer(shard.servicer, to_supervisor, index=index, metrics=shard.metrics)
            endpoints.append(ApiServer(servicer, listen="127.0.0.1:0", metrics=shard.metrics, security=security))
            stack.push_async_callback(endpoints[-1].stop)
            addresses.append(await endpoints[-1].start())
        yield Sharded(
            addresses=addresses,
            endpoints=endpoints,
            links=links,
            shards=shards,
            placements=placements,
            supervisor=supervisor,
        )


@asynccontextmanager
async def bare_stub(served: Sharded, shard: int = 0) -> AsyncIterator[Any]:
    """A client that uses the generated stub alone, connected to a shard."""
    async with grpc.aio.insecure_channel(served.addresses[shard]) as channel:
        yield env_pb2_grpc.CUAEnvStub(channel)


def reset_request(request_id: str, **fields: Any) -> env_pb2.ResetRequest:
    options = env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_NONE)
    return env_pb2.ResetRequest(request_id=request_id, task_id=TASK, observation=options, **fields)


def step_request(episode_id: str, index: int, request_id: str = "") -> env_pb2.StepRequest:
    return env_pb2.StepRequest(
        request_id=request_id or f"step-{index}",
        episode_id=episode_id,
        step_index=index,
        actions=[env_pb2.Action(click=env_pb2.Click(at=env_pb2.Point(x=819, y=100)))],
        observation=env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_NONE),
    )


async def shard_with_queue(served: Sharded) -> int:
    """Wait until a group is queued in one shard, and return the shard."""
    while True:
        changes = [shard.pool.changes.next for shard in served.shards]
        for index, shard in enumerate(served.shards):
            if shard.pool.statistics().waiting_count:
                return index
        await race(*changes)


async def clicks(stub: Any, episode_id: str) -> bytes:
    request = env_pb2.ReadGuestFileRequest(episode_id=episode_id, path="/home/user/clicks.txt")
    data: bytes = (await stub.ReadGuestFile(request)).data
    return data


async def test_a_group_and_its_forks_are_on_one_shard_and_the_next_group_on_the_other(tmp_path: Path) -> None:
    async with (
        serve_shards(tmp_path, size=3) as served,
        AsyncEnvClient(served.address) as client,
        client.reset_group(TASK, size=2) as group,
        client.reset_group(TASK, size=2) as others,
    ):
        ids, other_ids = ([episode.episode_id for episode in each] for each in (group, others))
        assert [len({shard_of(each) for each in members}) for members in (ids, other_ids)] == [1, 1]
        assert {shard_of(each) for each in (*ids, *other_ids)} == {0, 1}
        await group[0].step(COUNT)
        async with bare_stub(served) as stub:
            fork = await stub.Fork(env_pb2.ForkRequest(request_id="f", episode_id=ids[0], step_index=1, fork_count=1))
        (copy,) = fork.episodes
        assert shard_of(copy.episode_id) == shard_of(ids[0])
        assert (copy.step_count, copy.parent_episode_id) == (1, ids[0])
        (pool,) = await client.list_pools()
        assert pool.capacity == 6
        assert {each.episode_id for each in await client.list_episodes()} == {*ids, *other_ids, copy.episode_id}


async def test_a_reset_goes_to_the_shard_that_has_room(tmp_path: Path) -> None:
    async with (
        serve_shards(tmp_path) as served,
        AsyncEnvClient(served.address) as client,
        client.reset(TASK) as first,
        client.reset(TASK) as second,
    ):
        assert {shard_of(first.episode_id), shard_of(second.episode_id)} == {0, 1}
        await second.close()
        async with client.reset(TASK) as third:
            assert shard_of(third.episode_id) == shard_of(second.episode_id)


async def test_a_reset_that_was_refused_may_be_retried_on_another_shard(tmp_path: Path) -> None:
    async with serve_shards(tmp_path) as served, bare_stub(served) as stub:
        first = (await stub.Reset(reset_request("a"))).episodes[0].episode_id
        second = (await stub.Reset(reset_request("b"))).episodes[0].episode_id
        waiting = reset_request("c", ready_timeout=Duration(nanos=100_000_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reset(waiting)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The refused request and its retry go to different shards, whichever the first was.
        for number, episode_id in enumerate((first, second)):
            await stub.Close(env_pb2.CloseRequest(episode_id=episode_id))
            retried = (await stub.Reset(waiting)).episodes[0].episode_id
            assert shard_of(retried) == shard_of(episode_id), number
            await stub.Close(env_pb2.CloseRequest(episode_id=retried))
            waiting.request_id += "x"
            held = await stub.Reset(reset_request(f"held-{number}"))
            assert shard_of(held.episodes[0].episode_id) == shard_of(episode_id)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Reset(waiting)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
async def test_as_many_resets_at_once_as_machines_get_one_each_and_one_more_waits_for_a_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[int]
) -> None:
    # As if the supervisor knew nothing of the shards' machines: the shards alone decide.
    monkeypatch.setattr(servicer, "ranked_shards", lambda *_, **__: order)
    async with serve_shards(tmp_path, size=8) as served, bare_stub(served) as stub:
        responses = await asyncio.gather(*(stub.Reset(reset_request(f"r{number}")) for number in range(16)))
        ids = [each.episodes[0].episode_id for each in responses]
        assert Counter(shard_of(each) for each in ids) == {0: 8, 1: 8}
        waiting = stub.Reset(reset_request("one-more"))
        shard = await shard_with_queue(served)
        assert shard == order[0]
        assert not waiting.done()
        await stub.Close(env_pb2.CloseRequest(episode_id=next(each for each in ids if shard_of(each) == shard)))
        assert shard_of((await waiting).episodes[0].episode_id) == shard


async def test_groups_of_several_sizes_at_once_fill_all_shards(tmp_path: Path) -> None:
    async with serve_shards(tmp_path, size=4, count=3) as served, bare_stub(served) as stub:
        requests = [reset_request(f"r{number}", group_size=2) for number in range(6)]
        responses = await asyncio.gather(*(stub.Reset(request) for request in requests))
        groups = [{shard_of(each.episode_id) for each in response.episodes} for response in responses]
        assert all(len(group) == 1 for group in groups)
        assert Counter(shard for group in groups for shard in group) == {0: 2, 1: 2, 2: 2}


async def test_a_cancelled_reset_that_waits_is_joined_by_its_retry(tmp_path: Path) -> None:
    async with serve_shards(tmp_path) as served, bare_stub(served) as stub:
        held = [(await stub.Reset(reset_request(f"held-{number}"))).episodes[0].episode_id for number in range(2)]
        first = stub.Reset(reset_request("r"))
        shard = await shard_with_queue(served)
        first.cancel()
        retried = stub.Reset(reset_request("r"))
        await stub.Close(env_pb2.CloseRequest(episode_id=next(each for each in held if shard_of(each) == shard)))
        (opened,) = (await retried).episodes
        assert shard_of(opened.episode_id) == shard
        listed = (await stub.ListEpisodes(env_pb2.ListEpisodesRequest())).episodes
        assert len(listed) == 2, "the cancelled call opened none of its own"


async def test_a_reset_that_waited_for_a_machine_until_its_timeout_is_not_offered_to_another_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[RelayChannel] = []
    unary = RelayChannel.unary

    def counted(self: RelayChannel, method: str, request: Any, **options: Any) -> Any:
        calls.append(self)
        return unary(self, method, request, **options)

    monkeypatch.setattr(RelayChannel, "unary", counted)
    async with serve_shards(tmp_path, faults=Faults(boot_delay_s=3600.0)) as served, bare_stub(served) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reset(reset_request("r", ready_timeout=Duration(nanos=100_000_000)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        to_shards = [call for call in calls if any(call is link.channel for link in served.links)]
        assert len(to_shards) == 1


async def test_a_retry_whose_shard_lost_it_and_is_full_goes_to_another_shard(tmp_path: Path) -> None:
    async with serve_shards(tmp_path) as served, bare_stub(served) as stub:
        held = (await stub.Reset(reset_request("held"))).episodes[0].episode_id
        full = shard_of(held)
        assert full is not None
        served.placements.place("/r", full)
        first = (await stub.Reset(reset_request("r"))).episodes[0].episode_id
        assert shard_of(first) == 1 - full
        await stub.Close(env_pb2.CloseRequest(episode_id=held))
        assert (await stub.Reset(reset_request("r"))).episodes[0].episode_id == first


async def test_a_client_cannot_forbid_its_reset_to_queue(tmp_path: Path) -> None:
    async with (
        serve_shards(tmp_path) as sharded,
        serve_fake(size=1, capacity=1) as single,
        bare_stub(sharded) as supervisor_stub,
        grpc.aio.insecure_channel(single.address) as channel,
    ):
        single_stub: Any = env_pb2_grpc.CUAEnvStub(channel)
        for stub, count in ((supervisor_stub, 2), (single_stub, 1)):
            for number in range(count):
                await stub.Reset(reset_request(f"held-{number}"))
            request = reset_request("r", ready_timeout=Duration(nanos=100_000_000))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Reset(request, metadata=(NO_QUEUE_HEADER,))
            assert "had no room for 1 within" in (caught.value.details() or ""), "it queued"


async def test_a_retried_reset_and_a_retried_step_are_replayed(tmp_path: Path) -> None:
    async with serve_shards(tmp_path, size=2) as served, bare_stub(served) as stub:
        first, joined = await asyncio.gather(stub.Reset(reset_request("r")), stub.Reset(reset_request("r")))
        episode_id = first.episodes[0].episode_id
        assert joined.episodes[0].episode_id == episode_id
        assert (await stub.Reset(reset_request("r"))).episodes[0].episode_id == episode_id
        assert not (await stub.Step(step_request(episode_id, 0))).replayed
        assert (await stub.Step(step_request(episode_id, 0))).replayed
        assert await clicks(stub, episode_id) == b"1\n"
        async with bare_stub(served, shard=1) as other:
            assert (await other.Reset(reset_request("r"))).episodes[0].episode_id == episode_id
            assert (await other.Step(step_request(episode_id, 0))).replayed
            assert await clicks(other, episode_id) == b"1\n"


async def test_a_relayed_response_names_the_episodes_shard_and_each_call_is_measured_once(tmp_path: Path) -> None:
    async with serve_shards(tmp_path) as served, bare_stub(served, 0) as first, bare_stub(served, 1) as second:
        episode_id = (await first.Reset(reset_request("r"))).episodes[0].episode_id
        own = shard_of(episode_id)
        for index, stub in enumerate((first, second)):
            call = stub.Step(step_request(episode_id, index))
            await call
            relayed_to = [value for key, value in await call.trailing_metadata() if key == RELAYED_KEY]
            assert relayed_to == ([] if index == own else [str(own)])
        measured = [shard.metrics.registry.get_sample_value(*STEPS_MEASURED) for shard in served.shards]
        assert measured == [1, 1]
        relayed = [
            shard.metrics.registry.get_sample_value("envd_relayed_calls_total", {"method": "Step"})
            for shard in served.shards
        ]
        assert relayed == ([None, 1] if own == 0 else [1, None])


async def test_a_client_finds_a_connection_to_an_episodes_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_channel, channel_count = Access.open_channel, 0

    def alternating(self: Access, _: str, *args: Any, **options: Any) -> grpc.aio.Channel:
        # As if the kernel gave the first two connections to one shard and the third to the other.
        nonlocal channel_count
        channel_count += 1
        return open_channel(self, served.addresses[channel_count > 2], *args, **options)

    async with serve_shards(tmp_path, size=4) as served:
        monkeypatch.setattr(Access, "open_channel", alternating)
        async with AsyncEnvClient(served.address) as client, AsyncExitStack() as stack:
            episodes = [await stack.enter_async_context(client.reset(TASK)) for _ in range(8)]
            assert Counter(shard_of(each.episode_id) for each in episodes) == {0: 4, 1: 4}
            for _ in range(4):
                for episode in episodes:
                    await episode.step(COUNT)
            relayed = served.shards[0].metrics.registry.get_sample_value("envd_relayed_calls_total", {"method": "Step"})
            # Two until the third connection was found, and one of each further episode until its shard was known.
            assert relayed == 2 + 3
            assert channel_count == 3


@pytest.mark.parametrize("shard", [0, 1])
async def test_streams_are_served_by_every_shard(tmp_path: Path, shard: int) -> None:
    async with serve_shards(tmp_path) as served, bare_stub(served) as stub:
        responses = [await stub.Reset(reset_request(f"r{number}")) for number in range(2)]
        ids = [response.episodes[0].episode_id for response in responses]
        episode_id = next(each for each in ids if shard_of(each) == shard)
        steps = stub.StreamSteps(env_pb2.StreamStepsRequest(step=step_request(episode_id, index)) for index in range(3))
        assert [response.step.episode.step_count async for response in steps] == [1, 2, 3]
        frames = stub.StreamFrames(iter([env_pb2.StreamFramesRequest(episode_id=episode_id)]))
        assert (await frames.read()).sequence == 1
        await stub.Close(env_pb2.CloseRequest(episode_id=episode_id))
        while await frames.read() is not grpc.aio.EOF:
            pass
        assert await frames.code() is grpc.StatusCode.OK


async def test_errors_of_shards_reach_the_client_with_their_reason(tmp_path: Path) -> None:
    async with serve_shards(tmp_path) as served, AsyncEnvClient(served.address) as client:
        with pytest.raises(GroupTooLarge):
            async with client.reset_group(TASK, size=2):
                pass
        with pytest.raises(BadRequest, match="max_steps"):
            async with client.reset(TASK, max_steps=1_000_000):
                pass
        async with bare_stub(served) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Reset(reset_request("r", ready_timeout=Duration(seconds=-1)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "ready_timeout" in (caught.value.details() or "")


@pytest.mark.parametrize("episode_id", ["ep-0123456789abcdef", "ep-s0xffff", "ep-s7xffff", "x"])
async def test_an_unknown_episode_is_not_found_and_closing_it_has_no_effect(tmp_path: Path, episode_id: str) -> None:
    async with serve_shards(tmp_path) as served, bare_stub(served) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Step(step_request(episode_id, 0))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert f"episode {episode_id}" in (caught.value.details() or "")
        await stub.Close(env_pb2.CloseRequest(episode_id=episode_id))
        assert not (await stub.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=[episode_id]))).episodes


async def test_leases_of_all_shards_are_renewed_in_one_call_and_pages_neither_skip_nor_repeat(tmp_path: Path) -> None:
    async with serve_shards(tmp_path, size=3) as served, bare_stub(served) as stub:
        ids = [(await stub.Reset(reset_request(f"r{number}"))).episodes[0].episode_id for number in range(5)]
        assert {shard_of(each) for each in ids} == {0, 1}
        asked = [*reversed(ids), "unknown"]
        renewed = await stub.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=asked, lease_ttl=Duration(seconds=77)))
        assert [each.episode_id for each in renewed.episodes] == list(reversed(ids))
        listed, token = [], ""
        while True:
            page = await stub.ListEpisodes(env_pb2.ListEpisodesRequest(page_size=2, page_token=token))
            listed += [each.episode_id for each in page.episodes]
            token = page.next_page_token
            if not token:
                break
        assert listed == ids, "oldest first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.KeepAlive(env_pb2.KeepAliveRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_while_a_shard_is_down_its_calls_are_unavailable_and_the_others_continue(tmp_path: Path) -> None:
    async with serve_shards(tmp_path, size=3) as served, bare_stub(served) as stub:
        requests = [reset_request(f"r{number}", group_size=2) for number in range(2)]
        ids = [(await stub.Reset(request)).episodes[0].episode_id for request in requests]
        lost = next(each for each in ids if shard_of(each) == 1)
        alive = next(each for each in ids if shard_of(each) == 0)
        await served.links[1].disconnect()
        assert (await stub.Step(step_request(alive, 0))).episode.step_count == 1
        for call in (
            stub.Step(step_request(lost, 0)),
            stub.ListEpisodes(env_pb2.ListEpisodesRequest()),
            stub.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=ids)),
            stub.Reset(requests[ids.index(lost)]),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "shard 1: is being restarted; retry with the same request_id"
        (pool,) = (await stub.ListPools(env_pb2.ListPoolsRequest(include_queue=True))).pools
        assert (pool.capacity_count, pool.problem) == (3, "shard 1: is being restarted")
        new = (await stub.Reset(reset_request("new"))).episodes[0].episode_id
        assert shard_of(new) == 0
        await served.links[1].connect()
        assert (await stub.Step(step_request(lost, 0))).episode.step_count == 1


async def test_a_token_sees_its_own_episodes_alone_on_every_shard(tmp_path: Path) -> None:
    first, second = new_token("first", "run"), new_token("second", "run")
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"{first.line}\n{second.line}\n")
    async with (
        serve_shards(tmp_path, size=1, security=SecurityConfig(tokens_file=tokens)) as served,
        AsyncEnvClient(served.address, token=first.secret) as mine,
        AsyncEnvClient(served.address, token=second.secret) as other,
        mine.reset(TASK) as one,
        mine.reset(TASK) as two,
    ):
        assert {each.episode_id for each in await mine.list_episodes()} == {one.episode_id, two.episode_id}
        assert await other.list_episodes() == []
        listed = {each.episode_id: each for each in await mine.list_episodes()}
        await other.close_episode(listed[one.episode_id])
        await one.step(COUNT)
        async with bare_stub(served) as stub:
            token = ("authorization", f"Bearer {second.secret}")
            # A client cannot name its caller: only the supervisor does.
            forged = ("envd-caller", "admin first")
            for metadata, code in (
                ((token, forged), grpc.StatusCode.NOT_FOUND),
                ((forged,), grpc.StatusCode.UNAUTHENTICATED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Step(step_request(two.episode_id, 0), metadata=metadata)
                assert caught.value.code() is code


async def test_a_shard_refuses_calls_that_do_not_come_from_the_supervisor(tmp_path: Path) -> None:
    async with serve_shards(tmp_path) as served, grpc.aio.insecure_channel(served.shards[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await env_pb2_grpc.CUAEnvStub(channel).ListPools(env_pb2.ListPoolsRequest())  # type: ignore[misc]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_draining_daemon_ends_watches_and_serves_its_episodes(tmp_path: Path) -> None:
    async with (
        serve_shards(tmp_path) as served,
        AsyncEnvClient(served.address) as client,
        client.reset(TASK) as episode,
        bare_stub(served) as stub,
    ):
        watch = stub.WatchPools(env_pb2.WatchPoolsRequest())
        await watch.read()
        for server in (*served.endpoints, served.supervisor):
            await server.drain()
        while await watch.read() is not grpc.aio.EOF:
            pass
        assert await watch.code() is grpc.StatusCode.OK
        await episode.step(COUNT)
