"""The gateway protocol of AReaL's OSWorld example: the HTTP service of the guest that belongs to a session.

Requests name a session by the header `x-paas-session-id` and the token by `x-paas-secret-token`. `POST /sandbox/start`
opens the session's episode and `POST /sandbox/stop` closes it, for `trainer.adapters.areal.pssdk`. All other routes are
the guest's own service, unchanged: OSWorld's, without the routes that serve the daemon itself.
"""

import re
from dataclasses import dataclass
from hashlib import sha256

import aiohttp
from aiohttp import web

from envd.api.security.access import Caller
from envd.base.errors import EpisodeNotFound, GuestError, GuestRefused, GuestUnresponsive, InvalidRequest
from envd.desktop.observation import Encoding, ObservationOptions
from envd.integrations.compat.protocols import Body, Routes, json_response, read_body
from envd.integrations.compat.sessions import Sessions, SessionTable

_SESSION = "x-paas-session-id"
_SESSION_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
#: A task without setup: the client sets the desktop up and scores it by the routes of the guest.
_DEFAULT_TASK = "osworld/desktop"
_NO_PIXELS = ObservationOptions(encoding=Encoding.NONE)
#: Above the 120 s that the guest's service allows a command, and the 1800 s that it waits for a window.
_GUEST_TIMEOUT_S = 1830.0
_MAX_RESPONSE_BYTES = 64 << 20
#: Files for guests pass through here.
_MAX_BODY_BYTES = 33 << 20

_GET = ("screenshot", "cursor_position", "accessibility", "terminal", "platform", "screen_size")
_POST = (
    "execute", "execute_with_verification", "run_python", "run_bash_script", "screen_size", "window_size", "wallpaper",
    "desktop_path", "list_directory", "file", "start_recording", "end_recording", "setup/launch", "setup/execute",
    "setup/execute_with_verification", "setup/open_file", "setup/activate_window", "setup/close_window",
    "setup/change_wallpaper", "setup/download_file", "setup/upload",
)  # fmt: skip


class _Start(Body):
    task_id: str = ""


class _Nothing(Body):
    pass


@dataclass(slots=True)
class _Session:
    owner: str
    task_id: str = _DEFAULT_TASK
    """Task of this and of later starts that name none, such as those after a revert."""
    start_count: int = 0
    """Episodes that it opened: a repeated start is part of the same one."""
    episode_id: str = ""


class ArealSandbox:
    """Serves the protocol on an application's routes."""

    def __init__(self, sessions: Sessions, routes: Routes) -> None:
        self._sessions = sessions
        self._known: SessionTable[tuple[str, str], _Session] = SessionTable()
        routes.add_health("/health", lambda: {"status": "ok", "active_sessions": len(self._known)})
        routes.add("POST", "/sandbox/start", self._start, method="Reset")
        routes.add("POST", "/sandbox/stop", self._stop, method="Close")
        for name in _GET:
            routes.add("GET", f"/{name}", self._forward, method="RunGuestCommand")
        for name in _POST:
            routes.add("POST", f"/{name}", self._forward, method="RunGuestCommand", max_body_bytes=_MAX_BODY_BYTES)

    async def _start(self, request: web.Request, caller: Caller) -> web.Response:
        session_id = _session_id(request)
        body = await read_body(request, _Start)
        session = self._enter(caller, session_id)
        session.task_id = body.task_id or session.task_id
        lost = session.episode_id
        if lost and not await self._sessions.is_active(lost) and session.episode_id == lost:
            # Its lease expired, its machine was lost, or somebody else closed it: the next one is another episode.
            session.episode_id = ""
            session.start_count += 1
        if not session.episode_id:
            # Repeated and concurrent starts of a session join one reset.
            result = await self._sessions.open(
                caller,
                session.task_id,
                observe=_NO_PIXELS,
                request_id=f"compat-{sha256(session_id.encode()).hexdigest()[:32]}-{session.start_count}",
                unlimited=True,
            )
            session.episode_id = result.episodes[0].episode_id
        return json_response({"sandboxId": session.episode_id, "sessionId": session_id})

    async def _stop(self, request: web.Request, caller: Caller) -> web.Response:
        await read_body(request, _Nothing)
        session = self._known.get((caller.name, _session_id(request)))
        if session is not None and session.episode_id:
            closing, session.episode_id = session.episode_id, ""
            session.start_count += 1
            await self._sessions.close(caller, closing)
        return json_response({"status": "stopped"})

    async def _forward(self, request: web.Request, caller: Caller) -> web.Response:
        session_id = _session_id(request)
        session = self._known.get((caller.name, session_id))
        if session is None or not session.episode_id:
            raise EpisodeNotFound(f"session {session_id}: no sandbox; start one by POST /sandbox/start")
        self._known.touch((caller.name, session_id))
        path = request.path.partition(f"/token/{request.match_info.get('token', '')}")[2] or request.path
        body = await request.read()
        headers = {"Content-Type": request.headers["Content-Type"]} if "Content-Type" in request.headers else {}

        async def call(guest_url: str) -> web.Response:
            return await _call(request.method, guest_url + path, body, headers)

        return await self._sessions.with_guest_service(session.episode_id, call)

    def _enter(self, caller: Caller, session_id: str) -> _Session:
        key = (caller.name, session_id)
        session = self._known.get(key)
        if session is None:
            session = _Session(owner=caller.name)
            self._known.add(key, session)
        self._known.touch(key)
        return session


def _session_id(request: web.Request) -> str:
    session_id = request.headers.get(_SESSION, "")
    if not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(_SESSION, "is missing or is not 1 to 128 of A-Z a-z 0-9 . _ -")
    return session_id


async def _call(method: str, url: str, body: bytes, headers: dict[str, str]) -> web.Response:
    """Return the response of a guest's service, which is not trusted. Raises: GuestRefused, GuestUnresponsive."""
    timeout = aiohttp.ClientTimeout(total=_GUEST_TIMEOUT_S)
    try:
        # No redirects, cookies or proxies: a guest could point us at other services of this host.
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as http,
            http.request(method, url, data=body or None, headers=headers, allow_redirects=False) as response,
        ):
            content = await response.content.read(_MAX_RESPONSE_BYTES + 1)
            while len(content) <= _MAX_RESPONSE_BYTES and (more := await response.content.read(_MAX_RESPONSE_BYTES)):
                content += more
            if len(content) > _MAX_RESPONSE_BYTES:
                raise GuestRefused(f"the guest's response has more than {_MAX_RESPONSE_BYTES} bytes")
            kind = response.headers.get("Content-Type", "application/octet-stream")
            return web.Response(status=response.status, body=content, headers={"Content-Type": kind})
    except TimeoutError as error:
        raise GuestUnresponsive(f"the guest's service did not answer within {_GUEST_TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise GuestError(f"the guest's service failed: {error}") from error
