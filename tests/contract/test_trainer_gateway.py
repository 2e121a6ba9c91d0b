"""The gateway over HTTP, with the official clients: exact tokens, rows, streams, limits and faults."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.support.gateway import ToolTokenizer, World, picture_url, served_gateway, tool_call
from tests.support.program import run_program
from trainer.gateway import server
from trainer.replay.trajectory import StoredTrajectory

if TYPE_CHECKING:
    # Tests import them: 4 s of CPU time for each process that only collects these.
    import anthropic
    import openai

TOKENIZER = ToolTokenizer()
END = TOKENIZER.encode("<|im_end|>")[0]
CLICK: Any = {
    "type": "function",
    "function": {
        "name": "click",
        "description": "Click a point.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


def client_of(world: World, session: str, **options: Any) -> "openai.AsyncOpenAI":
    import openai

    return openai.AsyncOpenAI(base_url=f"{world.base(session)}/v1", api_key="unused", max_retries=0, **options)


def shown(text: str, *urls: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


async def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as http, http.post(url, data=data, headers=headers) as response:
        return response.status, await response.json()


async def finish(world: World, session: str, **body: Any) -> tuple[int, Any]:
    return await post(f"{world.base(session)}/finish", body)


def check_row(world: World, line: Any) -> StoredTrajectory:
    """Check that a row's ids are those that the engine read and sampled, and return its trajectory."""
    trajectory = StoredTrajectory.from_row(line)
    (row,) = trajectory.rows
    sampled = [token for token, bit in zip(row.tokens[-row.response_length :], row.loss_mask, strict=True) if bit]
    image = TOKENIZER.encode("<|image_pad|>")[0]
    # The engine's stream has one placeholder for each picture: 64x64 pixels have 4 tokens.
    compact = TOKENIZER.encode(TOKENIZER.decode(row.tokens).replace("<|image_pad|>" * 4, "<|image_pad|>"))
    matching = [
        (prompt, reply)
        for prompt, reply in world.engine.log
        if compact[: len(prompt) + len(reply)] == prompt + reply and prompt.count(image) <= len(row.images)
    ]
    assert [token for _, reply in matching for token in reply] == sampled
    longest, last = matching[-1]
    assert longest + last == compact
    return trajectory


async def test_a_conversation_with_tools_and_pictures_is_one_row_of_the_engines_ids(tmp_path: Path) -> None:
    replies = iter([f"I click. {tool_call('click', x=3)}", "It is done."])
    async with served_gateway(lambda _: next(replies), tmp_path) as world, client_of(world, "s1") as client:
        messages: list[Any] = [{"role": "system", "content": "Act."}, shown("Press Save.", picture_url(1))]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[CLICK])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "I click."
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("click", {"x": 3})  # type: ignore[union-attr]
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "clicked"},
            shown("The screen now:", picture_url(2)),
        ]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[CLICK])
        assert second.choices[0].finish_reason == "stop"
        assert second.choices[0].message.content == "It is done."
        assert second.usage is not None
        assert second.usage.completion_tokens == len(world.engine.log[1][1])
        (prompt1, reply1), (prompt2, _) = world.engine.log
        assert prompt2[: len(prompt1) + len(reply1)] == prompt1 + reply1
        assert TOKENIZER.decode(prompt2[len(prompt1) + len(reply1) :]) == (
            "\n<|im_start|>user\n<tool_response>\nclicked\n</tool_response><|im_end|>\n"
            "<|im_start|>user\nThe screen now:<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        status, summary = await finish(world, "s1", reward=0.5, metadata={"task_id": "fake/save-note"})
        assert status == 200
        assert summary["row_reasons"] == {"first": 1}
        assert (summary["turns"], summary["finishes"]) == (2, {"calls": 1, "stop": 1})
        (line,) = world.lines("rows")
        trajectory = check_row(world, line)
        assert (trajectory.base_id, trajectory.reward) == ("fake/save-note", 0.5)
        assert trajectory.metadata["weight_versions"] == [["7", "7"]]
        assert len(trajectory.images) == 2
        assert world.lines("sessions") == [summary]


async def test_a_rewritten_history_begins_a_new_row_with_its_reason(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:

        async def ask(*messages: Any) -> None:
            await client.chat.completions.create(model="m", messages=messages)

        system, ok = {"role": "system", "content": "s"}, {"role": "assistant", "content": " ok\n"}
        first, second = shown("one", picture_url(1)), shown("two", picture_url(2))
        await ask(system, first)
        await ask(system, first, ok, second)
        await ask(system, {"role": "user", "content": "one"}, ok, second, ok, shown("three"))
        await ask(system, {"role": "user", "content": "A summary."})
        await ask({"role": "system", "content": "t"}, first, ok, second, ok, shown("three"))
        await ask(system, first, {"role": "assistant", "content": "yes"}, second)
        _, summary = await finish(world, "s1", reward=1)
        assert summary["row_reasons"] == {"first": 1, "pictures": 1, "conversation": 1, "system": 1, "history": 1}
        for line in world.lines("rows"):
            check_row(world, line)
        text = world.gateway.metrics.text().decode()
        assert 'gateway_rows_total{reason="pictures"} 1.0' in text
        assert 'gateway_rows_total{reason="first"} 1.0' in text


async def test_an_equal_request_replaces_the_latest_reply(tmp_path: Path) -> None:
    replies = iter(["bad", "good", "end"])
    async with served_gateway(lambda _: next(replies), tmp_path) as world, client_of(world, "s1") as client:
        messages: list[Any] = [shown("go")]
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "good"}, shown("on")]
        await client.chat.completions.create(model="m", messages=messages)
        _, summary = await finish(world, "s1", reward=1)
        assert (summary["rows"], summary["replaced"], summary["turns"]) == (1, 1, 3)
        (line,) = world.lines("rows")
        text = TOKENIZER.decode(line["rows"][0]["tokens"])
        assert "good" in text
        assert "bad" not in text


@pytest.mark.parametrize("bad", ["<tool_call>\n{", "[TOOL_CALLS] click(x=3)", tool_call("unknown", x=1)])
async def test_a_call_that_cannot_be_parsed_is_text(tmp_path: Path, bad: str) -> None:
    async with served_gateway(lambda _: bad, tmp_path) as world, client_of(world, "s1") as client:
        answer = await client.chat.completions.create(model="m", messages=[shown("go")], tools=[CLICK])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == bad
        assert answer.choices[0].message.tool_calls is None


# Streams


async def test_a_streamed_chat_completion_is_that_of_the_response(tmp_path: Path) -> None:
    said = f"I click. {tool_call('click', x=3)}\n{tool_call('click', x=4)}"
    async with served_gateway(lambda _: said, tmp_path) as world, client_of(world, "s1") as client:
        messages: Any = [shown("go", picture_url(1))]
        async with client.chat.completions.stream(
            model="m", messages=messages, tools=[CLICK], stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        assert message.content == "I click."
        assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [{"x": 3}, {"x": 4}]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(world.engine.log[0][1])
        await finish(world, "s1", reward=0)
        check_row(world, world.lines("rows")[0])


# Anthropic

TOOL: Any = {
    "name": "click",
    "description": "Click a point.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
COMPUTER: Any = {"type": "computer_20250124", "name": "computer", "display_width_px": 640, "display_height_px": 480}


def anthropic_of(world: World, session: str, **options: Any) -> "anthropic.AsyncAnthropic":
    import anthropic

    return anthropic.AsyncAnthropic(base_url=world.base(session), api_key="unused", max_retries=0, **options)


def image_block(shade: int) -> Any:
    data = picture_url(shade).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@pytest.mark.parametrize("streams", [False, True])
async def test_messages_of_anthropic_are_one_row(tmp_path: Path, streams: bool) -> None:
    replies = iter([f"Looking. {tool_call('computer', action='left_click', coordinate=[3, 4])}", "Done."])
    async with served_gateway(lambda _: next(replies), tmp_path) as world, anthropic_of(world, "s1") as client:
        messages: list[Any] = [{"role": "user", "content": [image_block(1), {"type": "text", "text": "Press Save."}]}]

        async def ask() -> Any:
            given: Any = {"model": "m", "max_tokens": 999, "system": "Act.", "messages": messages}
            if not streams:
                return await client.messages.create(**given, tools=[TOOL, COMPUTER])
            async with client.messages.stream(**given, tools=[TOOL, COMPUTER]) as stream:
                return await stream.get_final_message()

        first = await ask()
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["text", "tool_use"]
        call = first.content[1]
        assert (call.name, call.input) == ("computer", {"action": "left_click", "coordinate": [3, 4]})
        shot = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "ok"}, image_block(2)],
        }
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [shot]}]
        second = await ask()
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "Done.")
        assert second.usage.output_tokens == len(world.engine.log[1][1])
        _, summary = await finish(world, "s1", reward=1)
        assert summary["row_reasons"] == {"first": 1}
        trajectory = check_row(world, world.lines("rows")[0])
        assert len(trajectory.images) == 2


async def test_limits_and_stop_texts_are_those_of_the_api(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "abcdef###", tmp_path) as world, anthropic_of(world, "s1") as client:
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
        cut = await client.messages.create(max_tokens=3, **ask)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abc")
        stopped = await client.messages.create(max_tokens=9, stop_sequences=["f###"], **ask)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "f###")
        assert stopped.content[0].text == "abcde"
        assert world.engine.scripted.requests[-1]["sampling_params"]["stop"] == ["f###"]


# Responses


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_responses_of_openai_are_one_row(tmp_path: Path, streams: bool, by_id: bool) -> None:
    act = tool_call("computer", actions=[{"type": "click", "x": 3, "y": 4}, {"type": "wait"}])
    replies = iter([f"Looking. {act}", f"{tool_call('click', x=1)}", "Done."])
    async with served_gateway(lambda _: next(replies), tmp_path) as world, client_of(world, "s1") as client:
        tools: Any = [
            {"type": "computer_use_preview", "display_width": 640, "display_height": 480, "environment": "linux"},
            {"type": "function", "name": "click", "parameters": CLICK["function"]["parameters"], "strict": False},
        ]
        picture = {"type": "input_image", "image_url": picture_url(1), "detail": "auto"}
        history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Press Save."}, picture]}]
        sent, previous = 0, None

        async def ask() -> Any:
            nonlocal sent, previous
            given: Any = {"model": "m", "instructions": "Act.", "input": history[sent:], "tools": tools}
            given |= {"previous_response_id": previous} if by_id else {}
            if streams:
                async with client.responses.stream(**given) as stream:
                    async for _ in stream:
                        pass
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**given)
            history.extend(item.model_dump() for item in response.output)
            if by_id:
                sent, previous = len(history), response.id
            return response

        first = await ask()
        assert [item.type for item in first.output] == ["message", "computer_call", "computer_call"]
        assert (first.output[1].action.x, first.output[1].action.button) == (3, "left")
        for item in first.output[1:]:
            shot = {"type": "computer_screenshot", "image_url": picture_url(2)}
            history.append({"type": "computer_call_output", "call_id": item.call_id, "output": shot})
        second = await ask()
        assert json.loads(second.output[0].arguments) == {"x": 1}
        history.append({"type": "function_call_output", "call_id": second.output[0].call_id, "output": "ok"})
        third = await ask()
        assert (third.status, third.output_text) == ("completed", "Done.")
        _, summary = await finish(world, "s1", reward=1)
        assert summary["row_reasons"] == {"first": 1}
        trajectory = check_row(world, world.lines("rows")[0])
        assert len(trajectory.images) == 3


# Faults


async def test_a_harness_that_disconnects_leaves_no_turn_and_ends_the_engines_request(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        ask: Any = {"model": "m", "messages": [shown("go")]}
        await client.chat.completions.create(**ask)
        for streams in (False, True):
            world.engine.held.clear()
            world.engine.started.clear()
            asking = asyncio.create_task(client.chat.completions.create(**ask, stream=streams))
            await world.engine.started.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            async with asyncio.timeout(60):
                while world.engine.cancelled < 1 + streams:
                    await asyncio.sleep(0.01)
            world.engine.held.set()
        ask["messages"] += [{"role": "assistant", "content": "ok"}, shown("on")]
        await client.chat.completions.create(**ask)
        _, summary = await finish(world, "s1", reward=1)
        assert (summary["turns"], summary["rows"], summary["replaced"]) == (2, 1, 0)
        assert "gateway_lost_turns_total 2.0" in world.gateway.metrics.text().decode()


async def test_an_error_of_a_stream_that_has_begun_reaches_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic
    import openai

    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 0.05)
    async with served_gateway(lambda _: "ok", tmp_path) as world:
        world.engine.scripted.prompt_token_error = 1
        async with client_of(world, "s1") as client, anthropic_of(world, "s2") as other:
            for run, error in (
                (client.chat.completions.create(model="m", messages=[shown("go")], stream=True), openai.APIError),
                (client.responses.create(model="m", input="go", stream=True), openai.APIError),
                (
                    other.messages.create(
                        model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}], stream=True
                    ),
                    anthropic.APIStatusError,
                ),
            ):
                world.engine.held.clear()
                asyncio.get_running_loop().call_later(0.3, world.engine.held.set)
                stream: Any = await run
                with pytest.raises(error, match="void"):
                    async for _ in stream:
                        pass
                world.gateway._sessions.clear()


async def test_too_many_pictures_are_refused_and_fewer_may_follow(tmp_path: Path) -> None:
    import openai

    async with served_gateway(lambda _: "ok", tmp_path, max_pictures=3) as world, client_of(world, "s1") as client:
        many = shown("go", *(picture_url(shade) for shade in range(40)))
        with pytest.raises(openai.BadRequestError, match="40 pictures of 3") as refused:
            await client.chat.completions.create(model="m", messages=[many])
        assert refused.value.code == "images_exhausted"
        assert world.engine.log == []
        messages: list[Any] = [shown("go", picture_url(1), picture_url(2)), {"role": "assistant", "content": "ok"}]
        await client.chat.completions.create(model="m", messages=messages[:1])
        with pytest.raises(openai.BadRequestError, match="4 images of 3"):
            await client.chat.completions.create(
                model="m", messages=[*messages, shown("on", picture_url(3), picture_url(4))]
            )
        status, summary = await finish(world, "s1", reward=0.25)
        assert (status, summary["exhausted"], summary["turns"]) == (200, "images", 1)
        check_row(world, world.lines("rows")[0])


async def test_a_prompt_beyond_the_context_is_refused_as_by_the_vendors(tmp_path: Path) -> None:
    import anthropic
    import openai

    async with served_gateway(lambda _: "ok", tmp_path, context_tokens=200) as world:
        async with client_of(world, "s1") as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[shown("x" * 300)])
            assert refused.value.code == "context_length_exceeded"
        async with anthropic_of(world, "s2") as other:
            with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded"):
                await other.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": [image_block(1)] * 32}]
                )


async def test_a_harness_that_never_stops_is_refused_after_its_turns(tmp_path: Path) -> None:
    import openai

    async with served_gateway(lambda _: "ok", tmp_path, max_turns=2) as world, client_of(world, "s1") as client:
        for text in ("a", "b"):
            await client.chat.completions.create(model="m", messages=[shown(text)])
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[shown("c")])
            assert refused.value.code == "turns_exhausted"
        _, summary = await finish(world, "s1", reward=0.5)
        assert (summary["exhausted"], summary["reward"], len(world.lines("rows"))) == ("turns", 0.5, 2)


async def test_a_sampled_placeholder_ends_the_session_before_it(tmp_path: Path) -> None:
    import openai

    replies = iter(["ok", "<|image_pad|>"])
    async with served_gateway(lambda _: next(replies), tmp_path) as world, client_of(world, "s1") as client:
        messages: list[Any] = [shown("go")]
        await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "ok"}, shown("on")]
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=messages)
            assert refused.value.code == "placeholder_exhausted"
        _, summary = await finish(world, "s1", reward=1)
        assert (summary["exhausted"], summary["turns"]) == ("placeholder", 1)


async def test_the_engines_abort_is_repeated_and_never_a_reply(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        messages: list[Any] = [shown("go")]
        await client.chat.completions.create(model="m", messages=messages)
        world.engine.finishes, world.engine.version = ["abort"], "8"
        messages += [{"role": "assistant", "content": "ok"}, shown("on")]
        answer = await client.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].finish_reason == "stop"
        assert len(world.engine.log) == 3
        del world.engine.log[1]
        await finish(world, "s1", reward=1)
        trajectory = check_row(world, world.lines("rows")[0])
        assert trajectory.metadata["weight_versions"] == [["7", "8"]]


@pytest.mark.parametrize("fault", ["aborts", "mismatch", "malformed", "refuses"])
async def test_a_reply_that_the_engine_cannot_give_voids_the_session(tmp_path: Path, fault: str) -> None:
    import openai

    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        if fault == "aborts":
            world.engine.finishes = ["abort"] * 2
        if fault == "mismatch":
            world.engine.scripted.prompt_token_error = 1
        if fault == "malformed":
            world.engine.malformed = True
        if fault == "refuses":
            world.engine.failures = [400]
        with pytest.raises(openai.APIStatusError, match="void") as failed:
            await client.chat.completions.create(model="m", messages=[shown("go")])
        assert failed.value.status_code == 502
        with pytest.raises(openai.APIStatusError, match="void") as over:
            await client.chat.completions.create(model="m", messages=[shown("go")])
        assert over.value.status_code == 410
        _, summary = await finish(world, "s1", reward=1)
        assert summary["void"]
        assert summary["reward"] is None
        assert world.lines("rows") == []


async def test_without_an_engine_requests_are_to_be_repeated(tmp_path: Path) -> None:
    import openai

    async with (
        served_gateway(lambda _: "ok", tmp_path, engine_url="http://127.0.0.1:9", engine_attempts=1) as world,
        client_of(world, "s1") as client,
    ):
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="m", messages=[shown("go")])
        assert failed.value.status_code == 503
        assert failed.value.response.headers["retry-after"] == "5"
        assert failed.value.response.headers["x-should-retry"] == "true"
        _, summary = await finish(world, "s1", void="no engine")
        assert summary["void"] == "no engine"


async def test_an_id_names_one_session_until_it_is_finished(tmp_path: Path) -> None:
    import openai

    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        assert (await post(f"{world.url}/sessions", {"id": "s1"}))[0] == 201
        status, body = await post(f"{world.url}/sessions", {"id": "s1"})
        assert (status, body["error"]["code"]) == (409, "session_exists")
        await client.chat.completions.create(model="m", messages=[shown("go")])
        assert (await finish(world, "s1", reward=1))[0] == 200
        with pytest.raises(openai.APIStatusError, match="finished") as over:
            await client.chat.completions.create(model="m", messages=[shown("go")])
        assert over.value.status_code == 410
        assert (await finish(world, "s1", reward=1))[0] == 410
        assert (await finish(world, "s2", reward=1))[0] == 404
        assert (await post(f"{world.url}/sessions", {"id": "a b"}))[0] == 400


async def test_sessions_are_named_by_path_header_or_key(tmp_path: Path) -> None:
    import openai

    async with served_gateway(lambda _: "ok", tmp_path, key="secret", max_sessions=3) as world:
        base, ask = f"{world.url}/v1", {"model": "m", "messages": [shown("go")]}
        for name, options in {
            "a": {"base_url": f"{world.base('a')}/v1", "api_key": "secret"},
            "b": {"base_url": base, "api_key": "secret", "default_headers": {"x-session-id": "b"}},
            "c": {"base_url": base, "api_key": "secret:c"},
        }.items():
            async with openai.AsyncOpenAI(**options, max_retries=0) as client:  # type: ignore[arg-type]
                await client.chat.completions.create(**ask)  # type: ignore[call-overload]
            assert world.gateway.find(name).counts.turns == 1
        async with openai.AsyncOpenAI(base_url=base, api_key="secret", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="names no session"):
                await client.chat.completions.create(**ask)  # type: ignore[call-overload]
        async with openai.AsyncOpenAI(base_url=base, api_key="secret:d", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError, match="3 sessions are open"):
                await client.chat.completions.create(**ask)  # type: ignore[call-overload]


async def test_a_wrong_key_is_refused_in_the_apis_form(tmp_path: Path) -> None:
    import anthropic
    import openai

    async with served_gateway(lambda _: "ok", tmp_path, key="secret") as world:
        async with client_of(world, "s1") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.chat.completions.create(model="m", messages=[shown("go")])
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model="m", input="go")
        async with anthropic_of(world, "s1") as other:
            with pytest.raises(anthropic.AuthenticationError) as denied:
                await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}])
            assert denied.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert (await finish(world, "s1", reward=1))[0] == 401
        assert (await post(f"{world.base('s1')}/finish", {"void": "x"}, Authorization="Bearer secret"))[0] == 404


async def test_a_page_of_a_browser_cannot_finish_a_session(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        await client.chat.completions.create(model="m", messages=[shown("go")])
        status, body = await post(f"{world.base('s1')}/finish", {"reward": 1}, Origin="http://example.com")
        assert (status, body["error"]["code"]) == (403, "browser")
        assert world.lines("rows") == []


async def test_a_later_system_message_does_not_begin_a_row(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "developer", "content": "t"}, shown("go")]
        await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "ok"}, {"role": "system", "content": "Hurry."}]
        await client.chat.completions.create(model="m", messages=messages)
        _, summary = await finish(world, "s1", reward=1)
        assert summary["rows"] == 1
        text = TOKENIZER.decode(check_row(world, world.lines("rows")[0]).rows[0].tokens)
        assert text.startswith("<|im_start|>system\ns\n\nt<|im_end|>\n")
        assert "<|im_start|>user\nHurry.<|im_end|>" in text


async def test_calls_in_tags_and_one_at_a_time(tmp_path: Path) -> None:
    said = "<tool_call>\n<function=click>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
    async with served_gateway(lambda _: said, tmp_path) as world, client_of(world, "s1") as client:
        ask: Any = {"model": "m", "messages": [shown("go")], "tools": [CLICK], "parallel_tool_calls": False}
        answer = await client.chat.completions.create(**ask)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"x": 3}
        assert world.engine.scripted.requests[0]["sampling_params"]["stop"] == ["</tool_call>"]
        prompt = TOKENIZER.decode(world.engine.scripted.requests[0]["input_ids"])
        assert '"name": "click"' in prompt.partition("<|im_end|>")[0]


async def test_texts_of_tools_and_calls_cannot_spell_a_control_token(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world, client_of(world, "s1") as client:
        bad = "<|im_end|><|image_pad|>"
        tool = {"type": "function", "function": {"name": "click", "description": bad, "parameters": {"title": bad}}}
        call = {"id": "1", "type": "function", "function": {"name": "click", "arguments": json.dumps({"x": bad})}}
        messages: Any = [
            shown(bad),
            {"role": "assistant", "content": bad, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": bad},
        ]
        await client.chat.completions.create(model="m", messages=messages, tools=[tool])  # type: ignore[list-item]
        prompt = TOKENIZER.decode(world.engine.scripted.requests[0]["input_ids"])
        assert prompt.count("< |im_end|>") == 6
        assert prompt.count("<|im_end|>") == 4
        assert "<|image_pad|>" not in prompt


async def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path, body_bytes=100_000) as world:
        text = b'{"model": "m", "messages": "' + b"x" * 200_000 + b'"}'
        for path, kind in (("chat/completions", "invalid_request_error"), ("messages", "request_too_large")):
            status, body = await post(f"{world.base('s1')}/v1/{path}", text)
            assert (status, body["error"]["type"]) == (413, kind)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b" " * 1000

        url = f"{world.base('s1')}/v1/messages"
        async with aiohttp.ClientSession() as http, http.post(url, data=chunks()) as response:
            assert response.status == 413


TEXT = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", b"{", "not JSON"),
        ("chat/completions", b"[]", "not a JSON object"),
        ("chat/completions", {}, "messages is missing"),
        ("chat/completions", {"messages": "go"}, "not a list"),
        ("chat/completions", {"messages": [{"role": "pope", "content": "go"}]}, "role 'pope'"),
        ("chat/completions", {"messages": [TEXT], "n": 2}, "n must be 1"),
        ("chat/completions", {"messages": [TEXT], "max_tokens": "9"}, "max_tokens is not"),
        ("chat/completions", {"messages": [TEXT], "max_tokens": -1}, "less than 1"),
        ("messages", {"messages": [TEXT], "max_tokens": 0}, "less than 1"),
        ("responses", {"input": "go", "max_output_tokens": 0}, "less than 1"),
        ("chat/completions", {"messages": [TEXT], "tools": [{"type": "web"}]}, "not a function"),
        ("chat/completions", {"messages": [TEXT, {"role": "assistant", "content": "a"}]}, "last message"),
        ("chat/completions", {"messages": [shown("", "https://example.com/a.png")]}, "not a data URL"),
        ("chat/completions", {"messages": [shown("", "data:image/png;base64,AAAA")]}, "cannot be read"),
        ("chat/completions", {"messages": [shown("", "data:image/png;base64,!")]}, "cannot be read"),
        ("messages", b"{", "not JSON"),
        ("messages", {"messages": [{"role": "tool", "content": ""}]}, "role 'tool'"),
        ("messages", {"messages": [TEXT], "tools": [{"type": "web_search_1"}]}, "type 'web_search_1'"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type 'document'"),
        ("responses", {}, "input is missing"),
        ("responses", {"input": [{"type": "item_reference"}]}, "item_reference"),
        ("responses", {"input": [{"type": "computer_call_output", "output": "x"}]}, "not a data URL"),
        ("responses", {"input": "go", "previous_response_id": "resp_1"}, "previous response"),
    ],
)
async def test_a_malformed_request_is_refused_with_its_reason(tmp_path: Path, path: str, body: Any, words: str) -> None:
    async with served_gateway(lambda _: "ok", tmp_path) as world:
        status, answer = await post(f"{world.base('s1')}/v1/{path}", body)
        assert status == 400
        assert words in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        status, _ = await post(
            f"{world.base('s1')}/v1/chat/completions", {"messages": [TEXT], "seed": 1, "unknown": {"field": []}}
        )
        assert status == 200


async def test_an_idle_session_is_void(tmp_path: Path) -> None:
    async with served_gateway(lambda _: "ok", tmp_path, idle_s=0.0) as world, client_of(world, "s1") as client:
        await client.chat.completions.create(model="m", messages=[shown("go")])
        await world.gateway.expire()
        (line,) = world.lines("sessions")
        assert "no request for" in line["void"]
        assert world.lines("rows") == []


async def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8700/" in code
    async with served_gateway(lambda _: "4", tmp_path) as world:
        done = await run_program(sys.executable, "-c", code.replace("http://127.0.0.1:8700", world.url))
        assert done.status == 0, done.err
        check_row(world, world.lines("rows")[0])
