"""A server of OpenAI's chat completions with scripted replies, on a free loopback port.

It identifies the task by the instruction in the prompt, and the turn by the number of earlier replies.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp.web

from cuaenv.client import Action
from trainer.agent.coordinates import CoordinateSpace, to_model_points
from trainer.agent.grammars import Grammar

#: Requests contain screenshots.
_MAX_REQUEST_BYTES = 64 << 20


def say_steps(
    steps: Sequence[Sequence[Action]], grammar: Grammar, *, screen_px: tuple[int, int] = (1280, 800)
) -> list[str]:
    """Return steps in screen pixels as replies of a model with coordinates normalised to 0..1000."""
    space = CoordinateSpace.of("normalised", image_px=screen_px, screen_px=screen_px)
    return [grammar.render([to_model_points(action, space) for action in actions]) for actions in steps]


async def _nothing() -> None:
    pass


class ScriptedModel:
    """Replies by task; serve it with `served`."""

    def __init__(self, replies: Mapping[str, Sequence[str]], *, names: Sequence[str] = ("scripted",)) -> None:
        """Take replies by instruction; the last one is repeated. An unknown task gets status 400.

        Args:
            replies: By instruction.
            names: Names of the models in `/v1/models`.
        """
        self._replies = replies
        self._names = names
        self.asked_count = 0
        """Number of requests."""
        self.before_reply: Callable[[], Awaitable[None]] = _nothing
        """Awaited before each reply."""
        self.context_full_from_turn: int | None = None
        """Number of the turn from which requests fail because the context is full, as vLLM reports it."""

    async def complete(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        """Handle `/v1/chat/completions`."""
        self.asked_count += 1
        await self.before_reply()
        messages = (await request.json())["messages"]
        prompt = json.dumps(messages)
        replies = next((said for task, said in self._replies.items() if json.dumps(task)[1:-1] in prompt), None)
        if replies is None:
            return aiohttp.web.Response(status=400, text="no reply was written for this task")
        turn = sum(message["role"] == "assistant" for message in messages)
        if self.context_full_from_turn is not None and turn >= self.context_full_from_turn:
            error = {"code": "context_length_exceeded", "message": "This model's maximum context length is 8 tokens."}
            return aiohttp.web.json_response({"error": error}, status=400)
        message = {"role": "assistant", "content": replies[min(turn, len(replies) - 1)]}
        completion = {"id": "1", "created": 1, "model": "scripted", "object": "chat.completion"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return aiohttp.web.json_response({**completion, "choices": [choice]})

    async def models(self, _request: aiohttp.web.Request) -> aiohttp.web.Response:
        """Handle `/v1/models`."""
        return aiohttp.web.json_response({"data": [{"id": name} for name in self._names]})


@asynccontextmanager
async def served(model: ScriptedModel) -> AsyncIterator[str]:
    """Serve until the block ends; yields the base URL."""
    app = aiohttp.web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.router.add_post("/v1/chat/completions", model.complete)
    app.router.add_get("/v1/models", model.models)
    # Do not wait for replies that a test holds back.
    runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
