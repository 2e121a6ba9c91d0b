"""Limits of each token over real sockets: call rate, size of requests, running calls and machines."""

import asyncio
import itertools
import logging
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import grpc
import pytest

from cuaenv import client as trainer
from cuaenv.client import AsyncEnvClient
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.api.security.guard import BURST, INTERVAL_S, RateLimiter
from envd.api.security.tokens import new_token
from envd.api.server import SERVICE_NAME
from envd.base.telemetry.metrics import Metrics
from envd.tasks.catalogue import TaskCatalogue
from tests.support.callers import (
    HASTY,
    METHODS,
    SHORT_S,
    TASK,
    TIMEOUT_S,
    Refusal,
    Tokens,
    bearer,
    connected,
    dialled,
    limited,
    opened,
    opened_on_stub,
    outcome,
    refusal_of,
    refused,
    request_for,
    serving,
)
from tests.support.server import serve_fake

Code = grpc.StatusCode


async def test_a_call_above_the_rate_limit_does_nothing_and_returns_a_retry_delay(tokens: Tokens) -> None:
    async with (
        serving(limited(tokens, 1)) as (episodes, address),
        connected(address, tokens.alice.secret) as alice,
        connected(address, tokens.bob.secret) as bob,
    ):
        await alice.ListTasks(env_pb2.ListTasksRequest(), timeout=TIMEOUT_S)
        response = await outcome(alice, "Reset", env_pb2.ResetRequest(request_id="r", task_id="desktop/note"))
        assert (response.code, response.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
        assert response.retry_delay is not None
        assert timedelta(seconds=900) < response.retry_delay <= timedelta(seconds=1000)
        assert episodes.resets == []
        assert await opened_on_stub(bob), "other callers have their own limit"


async def test_keep_alive_and_close_are_exempt_from_the_rate_limit(tokens: Tokens) -> None:
    async with serving(limited(tokens, 1)) as (episodes, address), connected(address, tokens.alice.secret) as stub:
        episode_id = await opened_on_stub(stub)
        assert (await outcome(stub, "ListPools", env_pb2.ListPoolsRequest())).reason == "RATE_LIMITED"
        for _ in range(5):
            kept = await stub.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=[episode_id]), timeout=TIMEOUT_S)
            assert len(kept.episodes) == 1
        await stub.Close(env_pb2.CloseRequest(episode_id=episode_id), timeout=TIMEOUT_S)
        assert episodes.closed == [episode_id]


async def test_listing_unknown_tasks_compares_no_ids(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflib.get_close_matches", None)
    async with serving(tokens.security()) as (_, address), connected(address, tokens.viewer.secret) as viewer:
        ids = [f"desktop/note-{number}" for number in range(999)]
        listed = await viewer.ListTasks(env_pb2.ListTasksRequest(task_ids=[*ids, "desktop/note"]), timeout=TIMEOUT_S)
    assert [task.task_id for task in listed.tasks] == ["desktop/note"]


async def test_a_listing_has_a_limited_number_of_variants(tokens: Tokens) -> None:
    async with serving(tokens.security()) as (_, address), connected(address, tokens.viewer.secret) as viewer:
        ids = [f"desktop/note?seed={number}" for number in range(51)]
        refused = await outcome(viewer, "ListTasks", env_pb2.ListTasksRequest(task_ids=ids))
        assert refused.reason == "BAD_FIELD"
        assert "51 variants" in refused.text
        await viewer.ListTasks(env_pb2.ListTasksRequest(task_ids=ids[:50]), timeout=TIMEOUT_S)


async def test_each_listed_task_counts_as_a_call(tokens: Tokens) -> None:
    async with serving(limited(tokens, 10)) as (_, address), connected(address, tokens.alice.secret) as stub:
        request = env_pb2.ListTasksRequest(task_ids=[f"desktop/note?seed={number}" for number in range(9)])
        await stub.ListTasks(request, timeout=TIMEOUT_S)
        assert (await outcome(stub, "ListTasks", request)).reason == "RATE_LIMITED"


async def test_listings_build_each_variant_once_and_one_after_the_other(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    running = threading.Semaphore(1)

    def find(_: TaskCatalogue, task_id: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert running.acquire(blocking=False), "two listings at once"
        time.sleep(0.001)
        built.append(task_id)
        running.release()

    monkeypatch.setattr(TaskCatalogue, "find", find)
    async with serving(tokens.security()) as (_, address), connected(address, tokens.viewer.secret) as viewer:
        ids = [f"desktop/note?seed={number}" for number in range(5)]
        calls = (viewer.ListTasks(env_pb2.ListTasksRequest(task_ids=ids), timeout=TIMEOUT_S) for _ in range(3))
        await asyncio.gather(*calls)
    assert built == [*ids, *ids, *ids]


async def test_every_step_of_a_stream_counts_toward_the_rate_limit(tokens: Tokens) -> None:
    async with serving(limited(tokens, 3)) as (episodes, address), connected(address, tokens.alice.secret) as stub:
        episode_id = await opened_on_stub(stub)
        steps = [
            env_pb2.StreamStepsRequest(
                step=env_pb2.StepRequest(
                    request_id=str(uuid.uuid4()),
                    episode_id=episode_id,
                    step_index=index,
                    actions=[env_pb2.Action(type_text=env_pb2.TypeText(text="x"))],
                )
            )
            for index in range(3)
        ]
        call = stub.StreamSteps(timeout=TIMEOUT_S)
        # Nothing is sent after the refused step: grpc loses the cause if a message meets the end of its stream.
        for step in steps:
            await call.write(step)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert refusal_of(caught.value).reason == "RATE_LIMITED"
        assert len(episodes.actions) == 2


async def test_one_acknowledgement_per_frame_is_exempt_from_the_rate_limit(tokens: Tokens) -> None:
    async with (
        serve_fake(size=2, security=limited(tokens, 6)) as server,
        connected(server.address, tokens.alice.secret) as alice,
        connected(server.address, tokens.admin.secret) as admin,
    ):
        episode_id = await opened(alice)
        call = alice.StreamFrames(timeout=TIMEOUT_S)
        await call.write(env_pb2.StreamFramesRequest(episode_id=episode_id))
        frames = aiter(call)
        for sequence in range(1, 7):
            assert (await anext(frames)).sequence == sequence
            await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=sequence))
            if sequence < 6:
                step = request_for("Step", episode_id)
                step.step_index = sequence - 1
                await admin.Step(step, timeout=TIMEOUT_S)
        # Of alice's six calls two are used; acknowledgements of nothing use up the others.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(5):
                await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=6))
        with refused("RATE_LIMITED"):
            await anext(frames)


async def test_a_call_above_the_rate_limit_is_refused_before_its_body_is_read(tokens: Tokens) -> None:
    async with (
        serving(limited(tokens, 1)) as (_, address),
        connected(address, tokens.viewer.secret) as stub,
        dialled(address) as channel,
    ):
        await stub.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        metadata = bearer(tokens.viewer)
        call: Any = channel.stream_stream(f"/{SERVICE_NAME}/ListTasks")(metadata=metadata, timeout=SHORT_S)
        with refused("RATE_LIMITED"):
            await call.read()


@pytest.mark.parametrize("method", METHODS)
async def test_an_undecodable_request_is_an_invalid_and_counted_one(
    method: str, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = bearer(tokens.admin)
    with caplog.at_level(logging.INFO):
        async with serving(limited(tokens, 1)) as (_, address), dialled(address) as channel:
            refusals: list[Refusal] = []
            for _ in range(2):
                # One request in one batch: a message sent to an already refused call fails in grpc, without the cause.
                stream: Any = channel.unary_stream(f"/{SERVICE_NAME}/{method}")
                call = stream(b"\xff", metadata=metadata, timeout=TIMEOUT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                refusals.append(refusal_of(caught.value))
    assert (refusals[0].code, refusals[0].reason) == (Code.INVALID_ARGUMENT, "BAD_FIELD")
    assert refusals[1].reason == ("BAD_FIELD" if method in {"KeepAlive", "Close"} else "RATE_LIMITED")
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]


async def test_a_request_larger_than_its_method_needs_is_refused(tokens: Tokens) -> None:
    async with serving(tokens.security()) as (_, address), connected(address, tokens.admin.secret) as stub:
        large = "x" * (9 << 20)
        step = env_pb2.StepRequest(episode_id=large)
        for method, request in (
            ("Observe", env_pb2.ObserveRequest(episode_id="x" * (1 << 20))),
            ("ListTasks", env_pb2.ListTasksRequest(page_token=large)),
            ("Step", step),
            ("StreamSteps", env_pb2.StreamStepsRequest(step=step)),
        ):
            refusal = await outcome(stub, method, request)
            assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "BAD_FIELD")
            assert f"{method} takes at most" in refusal.text


async def test_a_token_has_a_maximum_of_running_calls_and_can_still_renew_and_close(tokens: Tokens) -> None:
    security = tokens.security(max_calls_in_flight=2)
    async with (
        serving(security) as (episodes, address),
        connected(address, tokens.alice.secret) as alice,
        connected(address, tokens.bob.secret) as bob,
    ):
        ids = [await opened_on_stub(alice) for _ in range(3)]
        episodes.gate.clear()
        steps = [asyncio.ensure_future(outcome(alice, "Step", request_for("Step", i))) for i in ids]
        done, running = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        assert [(await step).reason for step in done] == ["RATE_LIMITED"]
        assert (await outcome(alice, "ListPools", env_pb2.ListPoolsRequest())).retry_delay == timedelta(seconds=1)
        await alice.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=ids), timeout=TIMEOUT_S)
        await bob.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        episodes.gate.set()
        await asyncio.wait(running)
        await alice.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        await alice.Close(env_pb2.CloseRequest(episode_id=ids[0]), timeout=TIMEOUT_S)


async def test_each_id_in_keep_alive_counts_toward_a_limit_of_its_own(tokens: Tokens) -> None:
    async with (
        serving(tokens.security(), renewals=RateLimiter(calls_per_second=0.001, burst=10)) as (_, address),
        connected(address, tokens.alice.secret) as alice,
        connected(address, tokens.bob.secret) as bob,
    ):
        request = env_pb2.KeepAliveRequest(episode_ids=["ep-1"] * 8)
        await alice.KeepAlive(request, timeout=TIMEOUT_S)
        assert (await outcome(alice, "KeepAlive", request)).reason == "RATE_LIMITED"
        await alice.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        await bob.KeepAlive(request, timeout=TIMEOUT_S)


async def test_without_tokens_all_connections_of_a_host_share_one_rate_limit() -> None:
    async with serving(limited(None, 1)) as (_, address):
        async with connected(address) as stub:
            await stub.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        # gRPC shares connections between channels with equal options; another option forces a new connection.
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            response = await outcome(env_pb2_grpc.CUAEnvStub(channel), "ListPools", env_pb2.ListPoolsRequest())
        assert response.reason == "RATE_LIMITED"


async def test_calls_above_the_rate_limit_do_not_fill_the_log(tokens: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.INFO, "envd.api.interceptors"):
        async with (
            serving(limited(tokens, 2), metrics=metrics) as (_, address),
            connected(address, "envd_wrong") as stub,
        ):
            for _ in range(10):
                await outcome(stub, "ListPools", env_pb2.ListPoolsRequest())
    assert [record.getMessage().split()[3] for record in caplog.records if "failed with" in record.getMessage()] == [
        "UNAUTHENTICATED/UNAUTHENTICATED"
    ] * 2
    assert metrics.registry.get_sample_value("envd_failures_total", {"reason": "RATE_LIMITED"}) == 8


async def test_refused_calls_do_not_fill_the_log(
    tokens: Tokens, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(RateLimiter.__init__, "__kwdefaults__", {"clock_s": lambda: now_s})
    with caplog.at_level(logging.INFO, "envd.api.interceptors"):
        async with (
            serving(tokens.security()) as (_, address),
            connected(address, "envd_wrong") as stranger,
            connected(address, tokens.alice.secret) as alice,
        ):
            for _ in range(BURST + 5):
                await outcome(stranger, "ListPools", env_pb2.ListPoolsRequest())
            assert len(caplog.records) == BURST
            # Other failures of other callers are logged.
            await outcome(alice, "Observe", env_pb2.ObserveRequest(episode_id="unknown"))
            assert "EPISODE_NOT_FOUND" in caplog.records[-1].getMessage()
            now_s = INTERVAL_S
            await outcome(stranger, "ListPools", env_pb2.ListPoolsRequest())
            assert "(after 5 more UNAUTHENTICATED of host ipv4:127.0.0.1" in caplog.records[-1].getMessage()
            await outcome(stranger, "ListPools", env_pb2.ListPoolsRequest())
            assert len(caplog.records) == BURST + 2


async def test_failed_calls_of_any_reason_do_not_fill_the_log(
    tokens: Tokens, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RateLimiter.__init__, "__kwdefaults__", {"clock_s": lambda: 0.0})
    with caplog.at_level(logging.INFO):
        async with serving(tokens.security()) as (episodes, address), connected(address, tokens.alice.secret) as stub:
            episode_id = await opened_on_stub(stub)
            step = request_for("Step", episode_id)
            step.step_index = 7
            fork = request_for("Fork", episode_id)
            fork.step_index = 7
            caplog.clear()
            for number in range(BURST + 5):
                step.request_id = fork.request_id = f"r{number}"
                assert (await outcome(stub, "Step", step)).reason == "STEP_INDEX_MISMATCH"
                assert (await outcome(stub, "Fork", fork)).reason == "STEP_INDEX_MISMATCH"
            assert len(caplog.records) == BURST
            caplog.clear()
            # A failure of the daemon is worth more lines.
            for number in range(BURST * BURST + 5):
                episodes.failures.append(RuntimeError("a bug"))
                step.request_id = f"b{number}"
                assert (await outcome(stub, "Step", step)).reason == "BUG"
            assert len(caplog.records) == BURST * BURST


async def test_calls_with_wrong_tokens_have_their_own_rate_limit(tokens: Tokens) -> None:
    async with (
        serving(limited(tokens, 2)) as (_, address),
        connected(address, "envd_wrong") as stub,
        connected(address, tokens.alice.secret) as alice,
    ):
        reasons = [(await outcome(stub, "ListPools", env_pb2.ListPoolsRequest())).reason for _ in range(3)]
        await alice.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
    assert reasons == ["UNAUTHENTICATED", "UNAUTHENTICATED", "RATE_LIMITED"]


async def test_our_client_waits_for_the_retry_delay_and_retries(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = tokens.security(calls_per_second=20, call_burst=1)
    # The clock advances by two thirds of a call per counted call, so that every second call exceeds the limit.
    times_s = itertools.count(100.0, 2 / 3 / 20)
    with monkeypatch.context() as patch:
        patch.setattr(RateLimiter.__init__, "__kwdefaults__", {"clock_s": lambda: next(times_s)})
        metrics = Metrics()
        async with serving(security, metrics=metrics) as (episodes, address):
            async with (
                AsyncEnvClient(address, token=tokens.alice.secret) as client,
                client.reset("desktop/note") as episode,
            ):
                for _ in range(3):
                    await episode.step(trainer.TypeText("x"))
            assert len(episodes.actions) == 3
        refused = metrics.registry.get_sample_value("envd_failures_total", {"reason": "RATE_LIMITED"})
        assert refused is not None
        assert refused >= 3
    async with (
        serving(limited(tokens, 1)) as (_, address),
        AsyncEnvClient(address, token=tokens.alice.secret) as client,
    ):
        await client.list_pools()
        with pytest.raises(trainer.RateLimited, match="'alice'"):
            await client.list_pools(timeout=timedelta(seconds=TIMEOUT_S))


async def test_a_token_holds_at_most_its_maximum_of_machines_and_gets_more_after_closing_some(tokens: Tokens) -> None:
    metrics_of_quota = {"reason": "TOKEN_QUOTA"}
    bounded = new_token("bounded", "run", max_machines=2)
    tokens.write(bounded.line, tokens.bob.line)
    async with serve_fake(size=2, capacity=4, security=tokens.security()) as server:
        async with (
            AsyncEnvClient(server.address, token=bounded.secret, retry=HASTY) as client,
            AsyncEnvClient(server.address, token=tokens.bob.secret) as bob,
        ):
            with pytest.raises(trainer.GroupTooLarge, match=r"'bounded': .* 2 .* 3"):
                async with client.reset_group(TASK, size=3):
                    pass
            async with client.reset(TASK) as first, client.fork(first, count=1) as copies:
                hasty = timedelta(seconds=4)
                for group in (client.reset(TASK, timeout=hasty), client.fork(first, count=1, timeout=hasty)):
                    with pytest.raises(trainer.PoolExhausted, match=r"'bounded': .* 2 .* 2") as refused:
                        async with group:
                            pass
                    assert refused.value.reason == "TOKEN_QUOTA"
                    assert refused.value.retry_after is not None
                async with bob.reset_group(TASK, size=2):
                    pass
                await copies[0].close()
                async with client.reset(TASK):
                    pass
        refusals = server.metrics.registry.get_sample_value("envd_failures_total", metrics_of_quota)
    assert refusals is not None
    assert refusals >= 2
