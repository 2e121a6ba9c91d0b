"""Desktops as an MCP server: the tools `reset`, `step`, `observe`, `evaluate` and `close`. Pictures are image content.

MCP's newest protocol has no connection state, so `reset` returns a session id and the other tools take it. Ids cannot
be guessed. A session is closed by `close`, after the settings' `idle_timeout` without a call, and with the server.

A fault or a mistake is a tool error (`isError`). The score of a void session is null, with the reason.
"""

import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from cuaenv.client import EnvError
from trainer.adapters.actions import ActionForm
from trainer.adapters.session import Session, SessionSettings, open_session

_INSTRUCTIONS = """\
Act on desktops. Call reset to open a session, look at the picture, call step with actions until the task is done, end \
with the action done (or fail, if the task is infeasible), then evaluate and close. Points are pixels of the picture."""
#: Ended sessions that are remembered, so that a late call gets the reason.
_MAX_ENDED = 1000

SessionId = Annotated[str, Field(description="The session id that reset returned.")]


class Result(BaseModel):
    """The result of `evaluate`."""

    score: float | None
    """A value in [0, 1]; null if the session is void."""
    void: str
    """Why there is no score; empty if there is one."""
    checks: list[str]
    """The task's checks, with their scores and evidence."""


class _Tools:
    """The tools, and the open sessions."""

    def __init__(self, settings: SessionSettings, *, task: str) -> None:
        self._settings = settings
        self._task = task
        self._sessions: dict[str, Session] = {}

    async def reset(
        self, task: Annotated[str, Field(description="Id of the task; may be empty if the server has a default.")] = ""
    ) -> list[str | Image]:
        """Open a session: a desktop at the start of a task. Returns its id, the instruction and a picture."""
        task = task or self._task
        if not task:
            raise ToolError("task is empty, and the server has no default task; name one")
        with _refused():
            session = await open_session(task, settings=self._settings)
        ended = [key for key, one in self._sessions.items() if one.done]
        for key in ended[:-_MAX_ENDED]:
            await self._sessions.pop(key).close()
        session_id = secrets.token_urlsafe(16)
        self._sessions[session_id] = session
        return [f"session: {session_id}\ninstruction: {session.instruction}", _picture(session)]

    async def step(
        self,
        session: SessionId,
        actions: Annotated[list[ActionForm], Field(min_length=1, max_length=64, description="Performed in order.")],
    ) -> list[str | Image]:
        """Perform actions, wait until the screen is quiet, and return a picture, errors and the results of tools."""
        one = self._find(session)
        with _refused():
            result = await one.step(*actions)
        lines = [f"action {number}: {error}" for number, error in enumerate(result.action_errors) if error]
        lines += [f"action {number}: {tool.output}" for number, tool in enumerate(result.tool_results) if tool]
        if result.done:
            lines.append(f"The episode has ended ({result.end_reason}). Call evaluate.")
        return ["\n".join(lines) or "ok", _picture(one)]

    async def observe(self, session: SessionId) -> list[str | Image]:
        """Return a picture of the current screen without acting."""
        one = self._find(session)
        with _refused():
            await one.observe()
        return ["ok", _picture(one)]

    async def evaluate(self, session: SessionId) -> Result:
        """Score the session once, and end it."""
        with _refused():
            score = await self._find(session).score()
        checks = [f"{check.name} {check.score:g}: {check.evidence}" for check in score.checks]
        return Result(score=score.value, void=score.void, checks=checks)

    async def close(self, session: SessionId) -> str:
        """Release the desktop."""
        await self._find(session).close()
        self._sessions.pop(session, None)
        return "closed"

    async def close_all(self) -> None:
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    def _find(self, session_id: str) -> Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise ToolError("session: unknown id, or closed; call reset") from None


def make_server(settings: SessionSettings, *, task: str = "") -> MCPServer[None]:
    """Return the server.

    Args:
        task: Task of a reset without a task; empty for none.
    """
    tools = _Tools(settings, task=task)

    @asynccontextmanager
    async def lifespan(_: MCPServer[None]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await tools.close_all()

    # Warnings only: standard error is a user's terminal.
    server = MCPServer("envd", instructions=_INSTRUCTIONS, lifespan=lifespan, log_level="WARNING")
    for tool in (tools.reset, tools.step, tools.observe, tools.close):
        server.add_tool(tool, structured_output=False)
    server.add_tool(tools.evaluate)
    return server


async def serve_http(server: MCPServer[None], listener: socket.socket) -> None:
    """Serve streamable HTTP at `/mcp` on a bound loopback socket until SIGINT or SIGTERM."""
    import uvicorn  # noqa: PLC0415 -- not needed for stdio

    host = listener.getsockname()[0]
    config = uvicorn.Config(server.streamable_http_app(host=host), log_level="warning")
    await uvicorn.Server(config).serve(sockets=[listener])


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except EnvError as error:
        raise ToolError(f"{error.reason or type(error).__name__}: {error}") from error


def _picture(session: Session) -> Image:
    return Image(data=session.observation.png, format="png")
