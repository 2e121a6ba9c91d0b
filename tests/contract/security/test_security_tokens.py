"""Tokens over real sockets: scopes, files that change, revocation, and the Unix socket."""

import asyncio
import logging
import os
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest

from cuaenv import client as trainer
from cuaenv.client import AsyncEnvClient
from cuaenv.v1 import env_pb2
from envd.api.security.access import RULES, Scope
from envd.api.security.tokens import new_token
from envd.api.server import SERVICE_NAME, ApiServer
from envd.base.config import SecurityConfig
from envd.base.errors import ConfigError
from envd.base.telemetry.metrics import Metrics
from tests.support.callers import (
    HASTY,
    METHODS,
    SHORT_S,
    TASK,
    TIMEOUT_S,
    Certs,
    Parties,
    Refusal,
    Tokens,
    connected,
    dialled,
    opened,
    opened_on_stub,
    outcome,
    refusal_of,
    refused,
    request_for,
    serving,
)
from tests.support.server import serve_fake
from tests.support.stub_episodes import StubEpisodes, pool_info

Code = grpc.StatusCode


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_token_is_refused_before_its_body_is_read(method: str, tokens: Tokens) -> None:
    async with serving(tokens.security()) as (episodes, address):
        async with dialled(address) as channel:
            # A call without a body: a server that read the body before the token would hang.
            call: Any = channel.stream_stream(f"/{SERVICE_NAME}/{method}")(timeout=TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert (refusal_of(caught.value).code, refusal_of(caught.value).reason) == (
            Code.UNAUTHENTICATED,
            "UNAUTHENTICATED",
        )
        assert episodes.calls == []


async def test_a_wrong_token_is_refused_and_never_logged_or_returned(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    wrong = new_token("alice", "run").secret
    async with serving(tokens.security(), metrics=metrics) as (_, address):
        with caplog.at_level(logging.DEBUG):
            async with AsyncEnvClient(address, token=wrong) as client:
                with pytest.raises(trainer.Unauthenticated) as caught:
                    await client.list_pools()
    assert metrics.registry.get_sample_value("envd_failures_total", {"reason": "UNAUTHENTICATED"}) == 1
    assert caught.value.retry_after is None
    assert str(caught.value).endswith("; pass token= or set ENVD_TOKEN")
    assert wrong not in caplog.text + repr(caught.value) + str(caught.value.metadata)
    assert tokens.alice.secret not in caplog.text


@pytest.mark.parametrize("method", METHODS)
async def test_a_token_with_too_small_a_scope_is_refused_by_name(method: str, tokens: Tokens) -> None:
    by_scope = {Scope.READ: tokens.viewer, Scope.RUN: tokens.alice, Scope.ADMIN: tokens.admin}
    needed = RULES[method].scope
    assert needed is not None
    async with serving(tokens.security()) as (_, address):
        for scope, token in by_scope.items():
            async with connected(address, token.secret) as stub:
                answer = await outcome(stub, method, request_for(method, "ep-1"))
            refused = isinstance(answer, Refusal) and answer.reason == "SCOPE_TOO_SMALL"
            assert refused is (scope < needed), answer
            if refused:
                assert answer.code is Code.PERMISSION_DENIED
                assert f"{method} needs {needed.word}" in answer.text


async def test_our_client_raises_scope_too_small(tokens: Tokens) -> None:
    async with (
        serving(tokens.security()) as (_, address),
        AsyncEnvClient(address, token=tokens.viewer.secret) as client,
    ):
        with pytest.raises(trainer.AccessDenied, match=r"'viewer': .*read"):
            async with client.reset("desktop/note"):
                pass


@pytest.mark.parametrize("problem", ["readable", "garbage", "missing"])
def test_an_invalid_token_file_fails_the_start(tokens: Tokens, problem: str) -> None:
    match problem:
        case "readable":
            tokens.path.chmod(0o644)
        case "garbage":
            tokens.write("alice run")
        case "missing":
            tokens.path.unlink()
    security = tokens.security()
    with pytest.raises(ConfigError, match=r"^security\.tokens_file: "):
        ApiServer(StubEpisodes(), listen="127.0.0.1:0", metrics=Metrics(), security=security)


async def test_a_replacement_token_is_valid_at_once_and_the_old_one_is_not(tokens: Tokens) -> None:
    renewed = new_token("alice", "run")
    async with (
        serving(tokens.security()) as (_, address),
        connected(address, tokens.alice.secret) as old,
        connected(address, renewed.secret) as new,
    ):
        episode_id = await opened_on_stub(old)
        tokens.write(renewed.line)
        assert (await outcome(old, "ListPools", env_pb2.ListPoolsRequest())).reason == "UNAUTHENTICATED"
        # The owner is the token's name, so episodes outlive the token that opened them.
        step = await new.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
        assert step.episode.step_count == 1


async def test_an_invalid_token_file_keeps_the_old_tokens_and_sets_a_metric(tokens: Tokens) -> None:
    metrics = Metrics()
    stale = {"setting": "tokens_file"}
    async with (
        serving(tokens.security(), metrics=metrics) as (_, address),
        connected(address, tokens.viewer.secret) as stub,
    ):
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 0
        tokens.write("not a line")
        await stub.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 1


async def test_revoking_a_token_ends_its_watches(tokens: Tokens) -> None:
    async with serving(tokens.security()) as (episodes, address), connected(address, tokens.viewer.secret) as stub:
        watch = aiter(stub.WatchPools(env_pb2.WatchPoolsRequest(), timeout=TIMEOUT_S))
        await anext(watch)
        tokens.write(tokens.admin.line)
        episodes.report_pools(pool_info(4))
        with refused("UNAUTHENTICATED"):
            await anext(watch)


async def test_revoking_a_token_stops_steps_on_an_open_stream(tokens: Tokens) -> None:
    async with serving(tokens.security()) as (episodes, address):
        async with connected(address, tokens.alice.secret) as stub:
            episode_id = await opened_on_stub(stub)
            call = stub.StreamSteps(timeout=TIMEOUT_S)
            await call.write(request_for("StreamSteps", episode_id))
            answers = aiter(call)
            await anext(answers)
            tokens.write(tokens.admin.line)
            await call.write(request_for("StreamSteps", episode_id))
            with refused("UNAUTHENTICATED"):
                await anext(answers)
        assert len(episodes.actions) == 1


async def test_revoking_a_token_ends_frames_that_are_only_received(parties: Parties, tokens: Tokens) -> None:
    episode_id = await opened(parties.alice)
    # No acknowledgement follows, so only responses can end the stream.
    request = env_pb2.StreamFramesRequest(episode_id=episode_id)
    frames = aiter(parties.alice.StreamFrames(iter([request]), timeout=TIMEOUT_S))
    await anext(frames)
    tokens.write(tokens.admin.line)
    await parties.admin.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
    with refused("UNAUTHENTICATED"):
        await anext(frames)


async def test_a_token_of_a_smaller_scope_loses_other_owners_frames(parties: Parties, tokens: Tokens) -> None:
    episode_id = await opened(parties.alice)
    frames = aiter(
        parties.admin.StreamFrames(iter([env_pb2.StreamFramesRequest(episode_id=episode_id)]), timeout=TIMEOUT_S)
    )
    await anext(frames)
    tokens.write(tokens.alice.line, tokens.admin.line.replace(" admin ", " run "))
    await parties.alice.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
    with refused("EPISODE_NOT_FOUND"):
        await anext(frames)


async def test_a_refused_acknowledgement_ends_its_stream_with_the_cause(parties: Parties, tokens: Tokens) -> None:
    episode_id = await opened(parties.alice)
    call = parties.alice.StreamFrames(timeout=SHORT_S)
    await call.write(env_pb2.StreamFramesRequest(episode_id=episode_id))
    frames = aiter(call)
    await anext(frames)
    tokens.write(tokens.admin.line)
    # No frame follows: the screen does not change.
    await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=1))
    with refused("UNAUTHENTICATED"):
        await anext(frames)


async def test_a_socket_with_tokens_is_still_accessible_only_to_its_owner(tmp_path: Path, tokens: Tokens) -> None:
    path = tmp_path / "envd.sock"
    async with serving(tokens.security(), listen=f"unix:{path}") as (_, address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with AsyncEnvClient(address) as client:
            with pytest.raises(trainer.Unauthenticated):
                await client.list_pools()
        async with AsyncEnvClient(address, token=tokens.viewer.secret) as client:
            assert await client.list_pools() == []


async def test_a_socket_is_created_with_mode_0600(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "envd.sock"
    modes: list[int] = []
    original = Path.chmod

    def chmod(self: Path, mode: int) -> None:
        modes.append(stat.S_IMODE(self.stat().st_mode))
        original(self, mode)

    monkeypatch.setattr(Path, "chmod", chmod)
    before = os.umask(0)
    try:
        async with serving(SecurityConfig(), listen=f"unix:{path}"):
            assert modes == [0o600], "the socket had its mode before chmod"
        assert os.umask(0) == 0
    finally:
        os.umask(before)


async def test_a_socket_for_own_processes_is_private_and_asks_for_tokens(
    certs: Certs, tokens: Tokens, tmp_path: Path
) -> None:
    path = tmp_path / "own.sock"
    security = SecurityConfig(tls_cert=certs["server"], tls_key=certs["server_key"], tokens_file=tokens.path)
    before = os.umask(0)
    try:
        async with serve_fake(size=1, security=security, local_socket=path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with AsyncEnvClient(f"unix:{path}", token="") as stranger:
                with pytest.raises(trainer.Unauthenticated):
                    await stranger.list_pools()
            async with AsyncEnvClient(f"unix:{path}", token=tokens.alice.secret) as alice:
                assert len(await alice.list_pools()) == 1
    finally:
        os.umask(before)


async def test_a_reset_fails_at_once_if_no_host_accepts_the_token(tokens: Tokens) -> None:
    security = tokens.security()
    async with (
        serving(security) as (_, first),
        serving(security) as (_, second),
        AsyncEnvClient([first, second], token="envd_unknown", retry=HASTY) as client,  # noqa: S106
        asyncio.timeout(60),
    ):
        with pytest.raises(trainer.Unauthenticated):
            async with client.reset(TASK):
                pass
