"""Use tools in one guest for its agent, by a program that the guest runs. Everything from the guest is untrusted.

The program comes with each request, so an image needs only Python; Windows guests run a script instead. What goes wrong
in the guest is the agent's result: it can end every program of its session. Only a guest that does not answer at all is
a failure.
"""

import asyncio
import inspect
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any

from pydantic import JsonValue

from cuaenv.actions import AskUser, CallTool, EditFile, ListDirectory, ReadFile, RunShell, ToolAction, WriteFile
from cuaenv.results import CommandResult
from envd.base.clock import running_timeout
from envd.base.errors import GuestError, GuestServiceEnded, GuestUnresponsive
from envd.desktop.observation import ActionOutcome
from envd.desktop.session import GuestSession
from envd.desktop.toolbox import windows
from envd.desktop.toolbox.results import OperationResult, parse
from envd.guests import toolbox as program

logger = logging.getLogger(__name__)

PROGRAM = inspect.getsource(program)
_PYTHON = ("python3", "-I", "-S", "-c")
_FILE_OPERATIONS = {ReadFile: "read", WriteFile: "write", EditFile: "edit", ListDirectory: "list"}
#: A call of an MCP server, and the start of one.
MCP_TIMEOUT_S = 30.0
_FILE_TIMEOUT_S = 30.0
#: guestd takes seconds to start, on a slow guest tens of them.
_RESTART_TIMEOUT_S, _RESTART_POLL_S = 60.0, 0.25
#: How much later than the program's own limit it counts as unresponsive: it starts Python, and ends what hangs. 20 s
#: were too few for an emulated guest of a host with a load of 9: its episode ended with a score of 0.
_GRACE_S = 60.0
#: Also a hanging command of 120 s is judged before a client's step times out, 180 s by default. Otherwise an agent
#: could void its episode by one.
_MAX_REQUEST_S = 140.0
_MAX_ERROR_CHARS = 2000


async def use(session: GuestSession, action: ToolAction) -> ActionOutcome:
    """Use a tool of a guest once. A tool that fails is reported in the outcome."""
    try:
        return await _use(session, action)
    except GuestServiceEnded:
        await _wait_for_service(session)
        return ActionOutcome(
            error="the desktop's service ended during this action, which may have had a part of its effect;"
            " it was started again"
        )
    except GuestError as error:
        return ActionOutcome(error=str(error)[:_MAX_ERROR_CHARS])


async def _wait_for_service(session: GuestSession) -> None:
    """Return when the restarted service answers. Raises: GuestUnresponsive: Not in time."""
    guestd = session.guestd("use tools")
    try:
        async with running_timeout(_RESTART_TIMEOUT_S):
            while True:
                with suppress(GuestUnresponsive):
                    await guestd.session()
                    return
                await asyncio.sleep(_RESTART_POLL_S)
    except TimeoutError as error:
        raise GuestUnresponsive(f"{session!r}: its service did not start again in time") from error


async def start_server(session: GuestSession, name: str, command: Sequence[str]) -> None:
    """Start an MCP server in the guest, which lives as long as the guest, or start it again.

    Raises:
        GuestError: It could not be started.
    """
    result = await _request(session, "start_server", MCP_TIMEOUT_S, name=name, command=list(command))
    if result.error:
        raise GuestError(result.error)


async def _use(session: GuestSession, action: ToolAction) -> ActionOutcome:
    match action:
        case RunShell(command=command, timeout=timeout):
            return _outcome(await _request(session, "shell", timeout.total_seconds(), command=command))
        case ReadFile() | WriteFile() | EditFile() | ListDirectory():
            return _outcome(await _request(session, _FILE_OPERATIONS[type(action)], None, **asdict(action)))
        case CallTool():
            return await _call(session, action)
        case AskUser():
            raise TypeError("a guest cannot answer for the user")
    raise TypeError(f"unknown tool action {action!r}")


async def _call(session: GuestSession, action: CallTool) -> ActionOutcome:
    is_list = not action.tool
    params = {} if is_list else {"name": action.tool, "arguments": json.loads(action.arguments)}
    method = "tools/list" if is_list else "tools/call"
    result = await _request(session, "request", MCP_TIMEOUT_S, server=action.server, method=method, params=params)
    if result.error or result.message is None:
        return ActionOutcome(error=result.error or "the MCP server sent no response")
    failure = result.message.get("error")
    if failure is not None:
        return ActionOutcome(error=f"MCP server {action.server}: {json.dumps(failure)[:_MAX_ERROR_CHARS]}")
    # Takes about 1 s.
    responses = await asyncio.to_thread(import_module, "envd.desktop.toolbox.responses")
    try:
        text, is_error = responses.text_of(result.message.get("result"), is_list=is_list)
    except ValueError as error:
        return ActionOutcome(error=f"MCP server {action.server} broke the protocol: {error}")
    output, left_out_bytes = cut(text)
    problem = f"{action.tool} of MCP server {action.server} reported an error" if is_error else ""
    return ActionOutcome(error=problem, output=output, left_out_bytes=left_out_bytes)


async def _request(
    session: GuestSession, operation: str, timeout_s: float | None, **arguments: JsonValue
) -> OperationResult:
    """Run the program. Raises: GuestError, GuestUnresponsive, MachineLost."""
    limits = {} if timeout_s is None else {"timeout_s": timeout_s}
    limit_s = min((timeout_s or _FILE_TIMEOUT_S) + _GRACE_S, _MAX_REQUEST_S)

    async def request(op: str, **fields: Any) -> OperationResult:
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        result = await parse(await session.use_tool(line, limit_s))
        if result.error:
            raise program.Refused(result.error)
        return result

    if session.has_powershell:
        try:
            return await windows.perform(request, operation, {**arguments, **limits})
        except program.Refused as refusal:
            return OperationResult(error=str(refusal)[:_MAX_ERROR_CHARS])
        except ValueError as error:
            raise GuestError("the desktop's tools sent a malformed response") from error
    line = json.dumps({"op": operation, **arguments, **limits}).encode()
    done = await session.guestd("use tools").execute([*_PYTHON, PROGRAM], timeout_s=limit_s, stdin=line)
    try:
        return await parse(done.stdout)
    except ValueError as error:
        logger.warning("%r: its tools failed: %s", session, _last_line(done))
        raise GuestError(f"the desktop's tools failed: {_last_line(done)}") from error


def _outcome(result: OperationResult) -> ActionOutcome:
    return ActionOutcome(
        error=result.error[:_MAX_ERROR_CHARS],
        output=None if result.error else result.output,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        left_out_bytes=result.left_out_bytes,
    )


def _last_line(done: CommandResult) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_MAX_ERROR_CHARS] if lines else f"exit code {done.exit_code}"


def cut(text: str) -> tuple[str, int]:
    """Return the first and last 16 KiB of a text with a note between them, and the number of bytes left out."""
    ends = program.Cut()
    ends.add(text.encode(errors="replace"))
    return ends.text(), ends.left_out
