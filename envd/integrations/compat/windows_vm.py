"""The protocol of the RPC server next to QEMU in the Windows recipe for slime: keys, text, screenshots and guest files.

That server has one machine and no way to open one. Here `POST /vm` opens an episode, and the client gets its address:
`HOST:PORT/vm/EPISODE`. Commands on the host (`/exec`) and to QEMU's monitor (`/hmp`) are refused.
"""

import asyncio
import io

import pydantic
from aiohttp import web
from PIL import Image

from cuaenv.actions import Action, TypeText
from cuaenv.agent_text.values import ParseError, monitor_chord, type_action
from envd.api.security.access import Caller
from envd.base.errors import InvalidRequest
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.types import EpisodeState
from envd.integrations.compat.protocols import Body, Routes, json_response, png_of, read_body
from envd.integrations.compat.sessions import Sessions
from envd.tasks.fields import BOM
from envd.tasks.text import decode

_NO_PIXELS = ObservationOptions(encoding=Encoding.NONE)
_PNG = ObservationOptions(encoding=Encoding.PNG)
_MAX_FILE_BYTES = 8 << 20
_MAX_KEYS = 64
_ENCODINGS = (BOM, "utf-8", "utf-16-le", "cp1252")


class _Open(Body):
    task_id: str


class _Nothing(Body):
    pass


class _Key(Body):
    key: str


class _Type(Body):
    text: str
    enter: bool = False
    delay: float = 0.12


class _Keys(Body):
    keys: tuple[str, ...] = pydantic.Field(max_length=_MAX_KEYS)
    delay: float = 0.3


class _GuestFile(Body):
    path: str
    timeout: float = 10.0


class WindowsVm:
    """Serves the protocol on an application's routes."""

    def __init__(self, sessions: Sessions, routes: Routes) -> None:
        self._sessions = sessions
        vm = "/vm/{episode_id}"
        routes.add_health("/health", lambda: {"ok": True})
        routes.add("POST", "/vm", self._open, method="Reset")
        routes.add("GET", f"{vm}/health", self._health, method="Observe")
        routes.add("GET", f"{vm}/status", self._status, method="Observe")
        routes.add("GET", f"{vm}/screenshot", self._screenshot, method="Observe")
        routes.add("GET", f"{vm}/screenshot/size", self._screenshot_size, method="Observe")
        routes.add("POST", f"{vm}/sendkey", self._send_key, method="Step")
        routes.add("POST", f"{vm}/type", self._type, method="Step")
        routes.add("POST", f"{vm}/keys", self._send_keys, method="Step")
        routes.add("POST", f"{vm}/guest-file", self._guest_file, method="ReadGuestFile")
        routes.add("POST", f"{vm}/evaluate", self._evaluate, method="Evaluate")
        routes.add("POST", f"{vm}/shutdown", self._shut_down, method="Close")
        routes.add_refused(f"{vm}/exec", "commands on the host are not served; use the guest's keyboard")
        routes.add_refused(f"{vm}/hmp", "QEMU's monitor is not served; use /sendkey and /screenshot")
        routes.add_refused(f"{vm}/reset", "machines are not rebooted; open a new episode by POST /vm")

    async def _open(self, request: web.Request, caller: Caller) -> web.Response:
        body = await read_body(request, _Open)
        result = await self._sessions.open(caller, body.task_id, observe=_NO_PIXELS, unlimited=True)
        episode_id = result.episodes[0].episode_id
        return json_response({"episode_id": episode_id, "path": f"/vm/{episode_id}", "instruction": result.instruction})

    async def _health(self, request: web.Request, _caller: Caller) -> web.Response:
        info = await self._sessions.info(request.match_info["episode_id"])
        return json_response({"ok": info.state is not EpisodeState.FAILED})

    async def _status(self, request: web.Request, _caller: Caller) -> web.Response:
        info = await self._sessions.info(request.match_info["episode_id"])
        running = info.state is not EpisodeState.FAILED
        return json_response({"qemu_running": running, "qemu_pid": None, "hmp_socket": False})

    async def _screenshot(self, request: web.Request, _caller: Caller) -> web.Response:
        episode_id = request.match_info["episode_id"]
        await self._sessions.info(episode_id)
        png = png_of((await self._sessions.observe(episode_id, _PNG)).frame)
        # In a thread: a screen takes some 20 ms.
        body = await asyncio.to_thread(_ppm, png)
        return web.Response(body=body, content_type="image/x-portable-pixmap")

    async def _screenshot_size(self, request: web.Request, _caller: Caller) -> web.Response:
        frame = (await self._sessions.observe(request.match_info["episode_id"], _NO_PIXELS)).frame
        header = _header(frame.screen_width_px, frame.screen_height_px)
        return json_response({"size": len(header) + 3 * frame.screen_width_px * frame.screen_height_px})

    async def _send_key(self, request: web.Request, _caller: Caller) -> web.Response:
        body = await read_body(request, _Key)
        error = await self._perform(request, [_chord(body.key, "key")])
        return json_response({"result": error, "key": body.key})

    async def _type(self, request: web.Request, _caller: Caller) -> web.Response:
        body = await read_body(request, _Type)
        text = body.text + ("\n" if body.enter else "")
        error = await self._perform(request, [_typed(text)]) if text else ""
        skipped = list(body.text) if error else []
        response = {"typed": len(body.text) - len(skipped), "skipped": skipped, "total": len(body.text)}
        return json_response(response | ({"result": error} if error else {}))

    async def _send_keys(self, request: web.Request, _caller: Caller) -> web.Response:
        body = await read_body(request, _Keys)
        actions = [_chord(key, f"keys.{index}") for index, key in enumerate(body.keys)]
        error = await self._perform(request, actions) if actions else ""
        if error:
            raise InvalidRequest("keys", error)
        return json_response({"sent": len(actions)})

    async def _guest_file(self, request: web.Request, _caller: Caller) -> web.Response:
        body = await read_body(request, _GuestFile)
        data = await self._sessions.read_file(request.match_info["episode_id"], body.path, max_bytes=_MAX_FILE_BYTES)
        content = decode(data, _ENCODINGS)
        if content is None:
            raise InvalidRequest("path", f"{body.path!r} is not a text file")
        return json_response({"content": content, "path": body.path})

    async def _evaluate(self, request: web.Request, _caller: Caller) -> web.Response:
        await read_body(request, _Nothing)
        return json_response({"reward": await self._sessions.evaluate(request.match_info["episode_id"])})

    async def _shut_down(self, request: web.Request, caller: Caller) -> web.Response:
        await self._sessions.close(caller, request.match_info["episode_id"])
        return json_response({"result": "shutdown sent"})

    async def _perform(self, request: web.Request, actions: list[Action]) -> str:
        """Perform actions as one step; return the guest's objection, or an empty text."""
        acted = await self._sessions.step(request.match_info["episode_id"], actions, observe=_NO_PIXELS)
        return acted.error


def _chord(text: str, field: str) -> Action:
    try:
        return monitor_chord(text)
    except ParseError as error:
        raise InvalidRequest(field, str(error)) from None


def _typed(text: str) -> TypeText:
    try:
        return type_action(text)
    except ParseError as error:
        raise InvalidRequest("text", str(error)) from None


def _header(width_px: int, height_px: int) -> bytes:
    return f"P6\n{width_px} {height_px}\n255\n".encode()


def _ppm(png: bytes) -> bytes:
    with Image.open(io.BytesIO(png)) as image:
        return _header(*image.size) + image.convert("RGB").tobytes()
