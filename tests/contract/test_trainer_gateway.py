"""The gateway over HTTP, with the official clients: exact tokens, rows, streams, limits and faults."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway import ToolTokenizer, World, picture_url, served_gateway, tool_call
from trainer.replay.trajectory import StoredTrajectory

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


def client_of(world: World, session: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.base(session)}/v1", api_key="unused", max_retries=0, **options)


def shown(text: str, *urls: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


async def finish(world: World, session: str, **body: Any) -> Any:
    import aiohttp

    async with aiohttp.ClientSession() as http, http.post(f"{world.base(session)}/finish", json=body) as response:
        return response.status, await response.json()


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
        assert trajectory.metadata["weight_versions"] == ["7", "7"]
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
