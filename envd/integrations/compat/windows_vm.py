"""The protocol of the RPC server next to QEMU in the Windows recipe for slime: keys, text, screenshots and guest files.

That server has one machine and no way to open one. Here `POST /vm` opens an episode, and the client gets its address:
`HOST:PORT/vm/EPISODE`. Commands on the host (`/exec`) and to QEMU's monitor (`/hmp`) are refused.
"""

import asyncio
from typing import Annotated

from aiohttp import web
from pydantic import Field

from cuaenv.actions import Action, TypeText
from cuaenv.agent_text.values import ParseError, monitor_chord, type_action
from cuaenv.client import Observation, State, View
from cuaenv.client.errors import SampleVoid
from envd.integrations.compat.callers import ProtocolSession, TokenHolder
from envd.integrations.compat.osworld_env import perform
from envd.integrations.compat.routes import Body, Routes, bad_field, json_response, read_body
from envd.tasks.fields import BOM
from envd.tasks.text import decode

_NO_PIXELS = View(encoding="none")
_PNG = View(encoding="png")
_MAX_KEYS = 64
_ENCODINGS = (BOM, "utf-8", "utf-16-le", "cp1252")


def add_windows_vm(routes: Routes[ProtocolSession]) -> None:
    """Add the protocol's routes. A session has the id of its episode."""
    vm = "/vm/{episode_id}"
    routes.add_health("/health", lambda: {"ok": True})
    routes.add("POST", "/vm", _open)
    routes.add("GET", f"{vm}/health", _health)
    routes.add("GET", f"{vm}/status", _status)
    routes.add("GET", f"{vm}/screenshot", _screenshot)
    routes.add("GET", f"{vm}/screenshot/size", _screenshot_size)
    routes.add("POST", f"{vm}/sendkey", _send_key)
    routes.add("POST", f"{vm}/type", _type)
    routes.add("POST", f"{vm}/keys", _send_keys)
    routes.add("POST", f"{vm}/guest-file", _guest_file)
    routes.add("POST", f"{vm}/evaluate", _evaluate)
    routes.add("POST", f"{vm}/shutdown", _shut_down)
    routes.add_refused(f"{vm}/exec", "commands on the host are not served; use the guest's keyboard")
    routes.add_refused(f"{vm}/hmp", "QEMU's monitor is not served; use /sendkey and /screenshot")
    routes.add_refused(f"{vm}/reset", "machines are not rebooted; open a new episode by POST /vm")


async def _open(_request: web.Request, caller: TokenHolder[ProtocolSession], *, task_id: str) -> web.Response:
    episode = await caller.open(task_id, view=_NO_PIXELS, of_calls=True)
    episode_id = episode.episode_id
    await caller.add(episode_id, ProtocolSession(episode=episode))
    return json_response({"episode_id": episode_id, "path": f"/vm/{episode_id}", "instruction": episode.instruction})


async def _health(request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
    return json_response({"ok": await _is_alive(request, caller)})


async def _status(request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
    is_alive = await _is_alive(request, caller)
    return json_response({"qemu_running": is_alive, "qemu_pid": None, "hmp_socket": False})


async def _screenshot(request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
    with caller.using_episode(_id(request)) as episode:
        seen = await episode.observe(_PNG, refresh=True)
    # In a thread: a screen takes some 20 ms.
    body = await asyncio.to_thread(_ppm, seen)
    return web.Response(body=body, content_type="image/x-portable-pixmap")


async def _screenshot_size(request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
    with caller.using_episode(_id(request)) as episode:
        seen = await episode.observe()
    size = len(_header(seen)) + 3 * seen.screen_width_px * seen.screen_height_px
    return json_response({"size": size})


async def _send_key(request: web.Request, caller: TokenHolder[ProtocolSession], *, key: str) -> web.Response:
    error = await _perform(request, caller, [_chord(key, "key")])
    return json_response({"result": error, "key": key})


async def _type(
    request: web.Request,
    caller: TokenHolder[ProtocolSession],
    *,
    text: str,
    enter: bool = False,
    delay: float = 0.12,  # noqa: ARG001 -- of the protocol; typing here needs no pauses
) -> web.Response:
    entered = text + ("\n" if enter else "")
    error = await _perform(request, caller, [_typed(entered)]) if entered else ""
    skipped = list(text) if error else []
    response = {"typed": len(text) - len(skipped), "skipped": skipped, "total": len(text)}
    return json_response(response | ({"result": error} if error else {}))


async def _send_keys(
    request: web.Request,
    caller: TokenHolder[ProtocolSession],
    *,
    keys: Annotated[tuple[str, ...], Field(max_length=_MAX_KEYS)],
    delay: float = 0.3,  # noqa: ARG001 -- as above
) -> web.Response:
    actions = [_chord(key, f"keys.{index}") for index, key in enumerate(keys)]
    error = await _perform(request, caller, actions) if actions else ""
    if error:
        raise bad_field("keys", error)
    return json_response({"sent": len(actions)})


async def _guest_file(
    request: web.Request,
    caller: TokenHolder[ProtocolSession],
    *,
    path: str,
    timeout: float = 10.0,  # noqa: ARG001 -- of the protocol
) -> web.Response:
    with caller.using_episode(_id(request)) as episode:
        content = decode(await episode.read_file(path), _ENCODINGS)
    if content is None:
        raise bad_field("path", f"{path!r} is not a text file")
    return json_response({"content": content, "path": path})


async def _evaluate(request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
    await read_body(request, Body)
    with caller.using_episode(_id(request)) as episode:
        return json_response({"reward": (await episode.evaluate()).score})


async def _shut_down(request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
    await caller.close(_id(request))
    return json_response({"result": "shutdown sent"})


def _id(request: web.Request) -> str:
    return request.match_info["episode_id"]


async def _is_alive(request: web.Request, caller: TokenHolder[ProtocolSession]) -> bool:
    """Return whether an episode's machine is alive. Raises: EpisodeNotFound."""
    with caller.using_episode(_id(request)) as episode:
        try:
            await episode.observe()
        except SampleVoid:
            return False
        return episode.state is not State.FAILED


async def _perform(request: web.Request, caller: TokenHolder[ProtocolSession], actions: list[Action]) -> str:
    """Perform actions as one step; return the guest's objection, or an empty text."""
    with caller.using_episode(_id(request)) as episode:
        _, error = await perform(episode, actions)
    return error


def _chord(text: str, field: str) -> Action:
    try:
        return monitor_chord(text)
    except ParseError as error:
        raise bad_field(field, str(error)) from None


def _typed(text: str) -> TypeText:
    try:
        return type_action(text)
    except ParseError as error:
        raise bad_field("text", str(error)) from None


def _header(seen: Observation) -> bytes:
    return f"P6\n{seen.screen_width_px} {seen.screen_height_px}\n255\n".encode()


def _ppm(seen: Observation) -> bytes:
    return _header(seen) + seen.image.tobytes()
