"""Episodes belong to the owner of a token: others can neither see nor use them."""

from dataclasses import replace

import grpc
import pytest

from cuaenv.v1 import env_pb2
from tests.support.callers import (
    METHODS,
    SERVICE,
    TASK,
    TIMEOUT_S,
    Parties,
    Refusal,
    connected,
    listed,
    opened,
    outcome,
    request_for,
)
from tests.support.server import serve_fake

Code = grpc.StatusCode


def names_an_episode(method: str) -> bool:
    kind = SERVICE.methods_by_name[method].input_type
    return bool({"episode_id", "episode_ids", "step"} & set(kind.fields_by_name))


@pytest.mark.parametrize("state", ["open", "closed"])
async def test_another_owners_episode_responds_like_an_unknown_one(parties: Parties, state: str) -> None:
    theirs, never = await opened(parties.alice), "ep-0123456789abcdef"
    if state == "closed":
        await parties.alice.Close(env_pb2.CloseRequest(episode_id=theirs), timeout=TIMEOUT_S)
    methods = [method for method in METHODS if names_an_episode(method)]
    assert len(methods) >= 11
    for method in methods:
        response = await outcome(parties.bob, method, request_for(method, theirs))
        if isinstance(response, Refusal):
            assert (response.code, response.reason) == (Code.NOT_FOUND, "EPISODE_NOT_FOUND")
            assert theirs in response.text
            response = replace(response, text=response.text.replace(theirs, never))
        else:
            assert method in {"Close", "KeepAlive"}
        assert response == await outcome(parties.bob, method, request_for(method, never)), method
    # An invalid request gets the same error for both, too.
    for wrong in (env_pb2.StepRequest(episode_id=theirs), env_pb2.ForkRequest(episode_id=theirs, fork_count=-1)):
        method = type(wrong).__name__.removesuffix("Request")
        response = await outcome(parties.bob, method, wrong)
        wrong.episode_id = never
        unknown = await outcome(parties.bob, method, wrong)
        assert {response.code, unknown.code} == {Code.NOT_FOUND}
        assert {response.reason, unknown.reason} == {"EPISODE_NOT_FOUND"}
    if state == "open":
        assert await listed(parties.alice) == {theirs}, "bob's Close had no effect"
        step = await parties.alice.Step(request_for("Step", theirs), timeout=TIMEOUT_S)
        assert step.episode.step_count == 1, "none of bob's calls had an effect"


async def test_why_an_episode_closed_is_reported_only_to_its_owner(parties: Parties) -> None:
    theirs = await opened(parties.alice)
    await parties.alice.Close(env_pb2.CloseRequest(episode_id=theirs), timeout=TIMEOUT_S)
    responses = [
        await outcome(stub, "Observe", request_for("Observe", theirs)) for stub in (parties.alice, parties.bob)
    ]
    assert [refusal.reason for refusal in responses] == ["EPISODE_NOT_FOUND", "EPISODE_NOT_FOUND"]
    assert "closed at" in responses[0].text
    assert "not found (never opened on this daemon" in responses[1].text


async def test_only_the_owner_renews_a_lease(parties: Parties) -> None:
    theirs, mine = await opened(parties.alice), await opened(parties.bob)
    request = env_pb2.KeepAliveRequest(episode_ids=[theirs, mine])
    kept = await parties.bob.KeepAlive(request, timeout=TIMEOUT_S)
    assert [episode.episode_id for episode in kept.episodes] == [mine]


async def test_listings_show_own_episodes_unless_the_scope_covers_all(parties: Parties) -> None:
    alices, bobs = await opened(parties.alice), await opened(parties.bob)
    assert await listed(parties.alice) == {alices}
    assert await listed(parties.bob) == {bobs}
    assert await listed(parties.viewer) == await listed(parties.admin) == {alices, bobs}


async def test_an_episode_can_be_got_by_those_who_may_list_it(parties: Parties) -> None:
    theirs = await opened(parties.alice)
    request = env_pb2.GetEpisodeRequest(episode_id=theirs)
    for stub in (parties.alice, parties.viewer, parties.admin):
        assert (await stub.GetEpisode(request, timeout=TIMEOUT_S)).episode.episode_id == theirs
    assert (await outcome(parties.bob, "GetEpisode", request)).reason == "EPISODE_NOT_FOUND"
    unknown = await outcome(parties.viewer, "GetEpisode", env_pb2.GetEpisodeRequest(episode_id="ep-none"))
    assert unknown.reason == "EPISODE_NOT_FOUND"


async def test_a_fork_belongs_to_its_parents_owner_even_if_another_caller_requested_it(parties: Parties) -> None:
    parent = await opened(parties.alice)
    own = await parties.alice.Fork(request_for("Fork", parent), timeout=TIMEOUT_S)
    admins = await parties.admin.Fork(request_for("Fork", parent), timeout=TIMEOUT_S)
    copies = {answer.episodes[0].episode_id for answer in (own, admins)}
    assert await listed(parties.alice) == {parent, *copies}
    assert await listed(parties.bob) == set()
    for copy in copies:
        assert (await outcome(parties.bob, "Step", request_for("Step", copy))).reason == "EPISODE_NOT_FOUND"
        await parties.alice.Step(request_for("Step", copy), timeout=TIMEOUT_S)


async def test_an_administrator_can_use_every_owners_episodes(parties: Parties) -> None:
    theirs = await opened(parties.alice)
    await parties.admin.Step(request_for("Step", theirs), timeout=TIMEOUT_S)
    await parties.admin.Close(env_pb2.CloseRequest(episode_id=theirs), timeout=TIMEOUT_S)
    assert await listed(parties.alice) == set()


async def test_a_guessed_request_id_does_not_return_another_owners_response(parties: Parties) -> None:
    theirs = await opened(parties.alice, "the-same-id")
    mine = await opened(parties.bob, "the-same-id")
    assert mine != theirs
    # An owner's own retry still returns its recorded response, and another body is refused under the id as sent.
    assert await opened(parties.alice, "the-same-id") == theirs
    other = env_pb2.ResetRequest(request_id="the-same-id", task_id=TASK, max_steps=3)
    response = await outcome(parties.bob, "Reset", other)
    assert response.reason == "REQUEST_ID_REUSED"
    assert "the-same-id was already used" in response.text
    assert "bob" not in response.text


async def test_a_guessed_request_id_does_not_return_another_owners_fork(parties: Parties) -> None:
    parent = await opened(parties.alice)
    request = request_for("Fork", parent)
    await parties.alice.Fork(request, timeout=TIMEOUT_S)
    assert (await outcome(parties.bob, "Fork", request)).reason == "EPISODE_NOT_FOUND"


async def test_without_tokens_all_callers_share_all_episodes() -> None:
    async with (
        serve_fake(size=1) as server,
        connected(server.address) as one,
        connected(server.address, "any token") as other,
    ):
        episode_id = await opened(one)
        await other.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
        assert await listed(other) == {episode_id}
