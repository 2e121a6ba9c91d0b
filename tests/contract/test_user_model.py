"""Users that a model plays: asked over HTTP, counted, bounded, and never a score without an answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cuaenv.client import AskUser, AsyncEnvClient, AsyncEpisode, SampleVoid, SetupFailed
from envd.base.config import TasksConfig
from envd.base.errors import ConfigError
from envd.tasks import user_model
from envd.tasks.model import Task
from envd.tasks.user_model import UserModel
from tests.support.server import load_fake_tasks, served_client

PERSONA = "You are Ann. The meeting is in room 7."


def with_persona() -> Task:
    """Return a task whose user a model plays."""
    blank = load_fake_tasks().get("fake/count-to-five").model_dump(exclude_unset=True, exclude={"oracle"})
    user = {"persona": PERSONA, "max_questions": 3}
    return Task.model_validate({**blank, "task_id": "fake/with-persona", "tools": ("ask_user",), "user": user})


class Endpoint:
    """A server of chat completions that answers what it is given, in turn; then always the last one."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[Any, str]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((await request.json(), request.headers.get("Authorization", "")))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return await answer()  # type: ignore[no-any-return]
        if isinstance(answer, int):
            return web.Response(status=answer, text="overloaded", headers={"Location": request.path})
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": answer}}]})


@asynccontextmanager
async def asked(endpoint: Endpoint, **settings: Any) -> AsyncIterator[tuple[AsyncEnvClient, AsyncEpisode]]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        config = TasksConfig(user_url=f"http://127.0.0.1:{port}/v1/", user_model="small", **settings)
        async with (
            served_client(extra_tasks=[with_persona()], user_model=UserModel(config)) as (_, client),
            client.reset("fake/with-persona") as episode,
        ):
            yield client, episode
    finally:
        await runner.cleanup()


async def said(episode: AsyncEpisode, question: str) -> str:
    (result,) = (await episode.step(AskUser(question))).tool_results
    assert result is not None
    return result.output


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_model, "_PAUSES_S", (0.0, 0.0))


async def test_a_model_answers_with_what_was_said_before_and_a_limited_number_of_times(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    endpoint = Endpoint(" Room 7. ", "As I said.", "x" * 10_000)
    async with asked(endpoint, user_key_file=key) as (client, episode):
        assert await said(episode, "Which room?") == "Room 7."
        async with client.fork(episode, count=1) as (copy,):
            assert await said(copy, "Again?") == "As I said."
        assert await said(episode, "And the date?") == "x" * 8192
        assert await said(episode, "Well?") == "x" * 8192
        assert (await episode.step(AskUser("More?"))).errors == ("the user answers no more than 3 questions",)
    (first, header), (second, _), *rest = endpoint.requests
    assert header == "Bearer sesame"
    assert (first["model"], first["temperature"], len(rest)) == ("small", 0.0, 2)
    assert [each["role"] for each in second["messages"]] == ["system", "user", "assistant", "user"]
    assert PERSONA in second["messages"][0]["content"]
    assert [each["content"] for each in second["messages"][1:]] == ["Which room?", "Room 7.", "Again?"]


async def test_a_busy_endpoint_is_asked_again() -> None:
    endpoint = Endpoint(503, 429, "Room 7.")
    async with asked(endpoint) as (_, episode):
        assert await said(episode, "Which room?") == "Room 7."
    assert len(endpoint.requests) == 3


async def test_a_model_that_the_agent_talks_into_silence_says_that_it_does_not_know() -> None:
    silent = {"choices": [{"message": {"content": " "}, "finish_reason": "stop"}]}
    async with asked(Endpoint(json.dumps(silent).encode())) as (_, episode):
        assert await said(episode, "Reply with nothing at all.") == "I do not know."


async def _never() -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


@pytest.mark.parametrize(
    ("answer", "problem", "attempts"),
    [
        (503, "status 503: 'overloaded'", 3),
        (401, "status 401", 1),
        (302, "status 302", 1),
        ("", "an empty answer", 1),
        (b"{}", "not a chat completion", 1),
        (b"nonsense", "not a chat completion", 1),
        (b"x" * (2 << 20), "more than 1048576 bytes", 1),
        (_never, "no answer in 0.5 s", 1),
    ],
)
async def test_an_endpoint_that_answers_no_question_voids_the_episode(
    answer: int | str | bytes | Callable[[], Any], problem: str, attempts: int
) -> None:
    endpoint = Endpoint(answer)
    async with asked(endpoint, user_timeout_s=0.5 if callable(answer) else 30) as (_, episode):
        with pytest.raises(SampleVoid, match=problem) as caught:
            await episode.step(AskUser("Which room?"))
        assert caught.value.reason == "USER_UNAVAILABLE"
        with pytest.raises(SampleVoid, match="USER_UNAVAILABLE"):
            await episode.evaluate()
    assert len(endpoint.requests) == 2 * attempts  # the agent's question, and ours


class Refusing(Endpoint):
    """Fails in a way for all conversations with the agent's words, and answers ours."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        if all("Which" not in each["content"] for each in messages):
            return web.json_response({"choices": [{"message": {"content": "Yes."}, "finish_reason": "stop"}]})
        return await super().handle(request)


def choice(content: str | None, finish_reason: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]}).encode()


@pytest.mark.parametrize(
    ("answer", "attempts"),
    [
        (400, 2),  # the context is full
        (413, 2),
        (500, 6),  # a text that the server cannot tokenize
        (choice("", "content_filter"), 2),
        (choice(None, "length"), 2),  # it thought until it had no tokens left
        (choice("", "length"), 2),
        (b"x" * (2 << 20), 2),
        (_never, 1),
    ],
)
async def test_a_question_that_alone_gets_no_answer_is_one_that_the_user_cannot_answer(
    answer: int | bytes | Callable[[], Any], attempts: int
) -> None:
    endpoint = Refusing(answer)
    async with asked(endpoint, user_timeout_s=0.5 if callable(answer) else 30) as (_, episode):
        assert await said(episode, "Which room?") == "I do not know."
        # Later requests contain that question too; the episode is scored as any other.
        assert await said(episode, "Again?") == "I do not know."
        assert (await episode.evaluate()).score == 0
    assert len(endpoint.requests) == 2 * attempts


async def test_an_endpoint_that_is_back_before_our_question_answers_the_agents() -> None:
    endpoint = Endpoint(503, 503, 503, "Yes.", "Room 7.")
    async with asked(endpoint) as (_, episode):
        assert await said(episode, "Which room?") == "Room 7."


async def test_without_an_endpoint_such_a_task_is_refused() -> None:
    async with served_client(extra_tasks=[with_persona()]) as (_, client):
        with pytest.raises(SetupFailed, match=r"a model plays its user, but tasks\.user_url is not set"):
            async with client.reset("fake/with-persona"):
                pass


def test_a_user_has_either_facts_or_a_persona_and_the_key_is_readable(tmp_path: Path) -> None:
    task = with_persona().model_dump(exclude_unset=True)
    both = {"persona": PERSONA, "facts": [{"about": "room", "answer": "7"}]}
    for user in ({}, both):
        with pytest.raises(ValueError, match="give either facts or a persona"):
            Task.model_validate({**task, "user": user})
    with pytest.raises(ConfigError, match=r"tasks\.user_key_file .* cannot be read"):
        UserModel(TasksConfig(user_url="http://127.0.0.1:1/v1", user_key_file=tmp_path / "none"))
    with pytest.raises(ValueError, match="user_url"):
        TasksConfig(user_url="ftp://host")
