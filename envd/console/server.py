"""Serve the console's page, its stream of updates, and what it asks for. The routes here only read.

The stream is one of server-sent events. The page reads it with `fetch` and not with `EventSource`, which cannot send
a token as a header; a token in a URL would appear in the logs of proxies.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic_core import from_json

from envd.api.security.http import caller_name, is_admitted, may_list
from envd.base.clock import Clock
from envd.base.errors import ConfigError, RetryableError, Unimplemented
from envd.base.telemetry.endpoint import serve_app
from envd.base.version import envd_version
from envd.console.board import Board, EpisodeHistory, episode_detail
from envd.console.control import add_control
from envd.console.pictures import Pictures
from envd.console.replays import PageReplays
from envd.console.runs import Runs
from envd.console.viewer import Viewer, event
from envd.episodes.checkpointing import tree_of
from envd.episodes.recording.library import Library
from envd.episodes.recording.records import RecordingUnreadable
from envd.episodes.service import EpisodeService

logger = logging.getLogger(__name__)

#: Pages that are open at the same time: of all callers, and of one.
MAX_VIEWERS = 64
MAX_VIEWERS_OF_CALLER = 16
#: A page that receives nothing for longer considers the connection lost.
_PING_S = 5.0
#: A page that takes no bytes for longer is disconnected.
_STALL_S = 60.0
_BODY_BYTES = 1 << 16
_VIDEO_CHUNK_BYTES = 1 << 20

_PAGE = {
    "/": ("index.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    **{
        f"/{name}": (name, "text/javascript")
        for name in ("console.js", "wall.js", "episode.js", "recordings.js", "control.js")
    },
}
#: Paths that need no token: they hold no data.
PUBLIC_PATHS = tuple(_PAGE)

_HEADERS = {
    # No inline scripts, no resources of other hosts: a text of a guest that were taken for HTML could do nothing.
    # Trusted types: the browser refuses to take any text for HTML.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@asynccontextmanager
async def serve_console(
    episodes: EpisodeService,
    listen: str,
    *,
    library: Library | None = None,
    tls: ssl.SSLContext | None = None,
    middlewares: Sequence[Middleware] = (),
    clock: Clock | None = None,
) -> AsyncIterator[str]:
    """Serve the console of an episode service and yield the bound address.

    Args:
        episodes: Not yet started, or the timeline lacks the steps before this call.
        listen: HOST:PORT, port 0 for a free one.
        library: The recordings to replay; None if episodes are not recorded.
        middlewares: Such as `require_token`; without it every caller is trusted.

    Raises:
        ConfigError: The address cannot be bound.
    """
    console = Console(episodes, library, clock=clock or Clock())
    app = web.Application(middlewares=[_with_headers, _own_page_only, *middlewares], client_max_size=_BODY_BYTES)
    console.add_routes(app.router)
    add_control(app.router, episodes)
    try:
        async with serve_app(app, listen, setting="console_listen", tls=tls) as address:
            try:
                yield address
            finally:
                console.end_streams()
    finally:
        await console.aclose()


@web.middleware
async def _with_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(_HEADERS)
        raise
    if not response.prepared:
        response.headers.update(_HEADERS)
    return response


@web.middleware
async def _own_page_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests that pages of other origins make: they could not read the response, but cause the work."""
    if request.path not in PUBLIC_PATHS and not _is_of_own_page(request):
        raise web.HTTPForbidden(
            text=f"{request.path}: requested by a page of another origin; open the console's page\n"
        )
    return await handler(request)


def _is_of_own_page(request: web.Request) -> bool:
    """Return whether the page, or no page, sent a request."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site in ("same-origin", "none")
    # Browsers without it, such as Safari before 16.4, send the origin of a page with what is not a plain read.
    return origin is None or urlsplit(origin).netloc == request.host


class Console:
    """The console's routes and what their viewers share."""

    def __init__(self, episodes: EpisodeService, library: Library | None, *, clock: Clock) -> None:
        self._episodes = episodes
        self._history = EpisodeHistory()
        episodes.events.add(self._history)
        self._replays = None if library is None else PageReplays(library)
        runs = Runs(clock)
        episodes.events.add(runs)
        self._board = Board(episodes, self._history, runs, clock=clock)
        self._pictures = Pictures(episodes)
        self._viewers: dict[str, Viewer] = {}
        self._stopping = asyncio.Event()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        for path, (name, content_type) in _PAGE.items():
            router.add_get(path, _file_handler(name, content_type))
        router.add_get("/api/events", self._events)
        router.add_post("/api/views/{view}", self._select)
        router.add_get("/api/episodes/{id}", self._episode)
        router.add_get("/api/recordings", self._recordings)
        router.add_get("/api/recordings/{id}", self._recording)
        router.add_get("/api/recordings/{id}/frames/{index}", self._frame)
        router.add_get("/api/recordings/{id}/video", self._video)

    def end_streams(self) -> None:
        """End the streams that otherwise last until their pages are closed."""
        self._stopping.set()
        for viewer in self._viewers.values():
            viewer.wake()

    async def aclose(self) -> None:
        await self._board.aclose()
        await self._pictures.aclose()
        if self._replays is not None:
            await self._replays.aclose()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Stream episodes, pools and pictures until the page is closed. A slow page skips pictures."""
        viewer = self._open_viewer(request)
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        # Proxies such as nginx would otherwise hold events back.
        response.headers["X-Accel-Buffering"] = "no"
        try:
            await response.prepare(request)
            hello = {"view": viewer.view_id, "version": envd_version(), "records": self._replays is not None}
            await _write(request, response, event("hello", hello))
            while not self._stopping.is_set() and is_admitted(request):
                is_silent = True
                for message in viewer.updates():
                    await _write(request, response, message)
                    is_silent = False
                if is_silent:
                    await _write(request, response, event("ping", {}))
                await viewer.wait(timeout_s=_PING_S)
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            del self._viewers[viewer.view_id]
            viewer.close()
        return response

    def _open_viewer(self, request: web.Request) -> Viewer:
        """Register a page. Raises: HTTPServiceUnavailable, HTTPTooManyRequests: too many are open."""
        caller = caller_name(request)
        if len(self._viewers) >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(
                text=f"the console already has {MAX_VIEWERS} open pages, its maximum; close one\n"
            )
        of_caller = sum(viewer.caller == caller for viewer in self._viewers.values())
        if caller and of_caller >= MAX_VIEWERS_OF_CALLER:
            raise web.HTTPTooManyRequests(
                text=f"token {caller}: {MAX_VIEWERS_OF_CALLER} pages are open, the maximum; close one\n"
            )
        viewer = Viewer(self._board, self._pictures, caller=caller, may_see=lambda owner: may_list(request, owner))
        self._viewers[viewer.view_id] = viewer
        return viewer

    async def _select(self, request: web.Request) -> web.Response:
        viewer = self._viewers.get(request.match_info["view"])
        if viewer is None:
            raise _not_found(f"view {request.match_info['view']}: not found; reload the page")
        tiles, full, live = _selection(await request.read())
        viewer.select(tiles, full, live=live)
        return web.Response(status=204)

    async def _episode(self, request: web.Request) -> web.Response:
        episode_id = request.match_info["id"]
        self._board.refresh()
        facts = self._board.episodes.get(episode_id)
        episode = self._episodes.find(episode_id)
        if facts is None or episode is None or not may_list(request, facts["owner"]):
            raise _not_found(f"episode {episode_id}: not found; it was closed, or never opened here")
        try:
            checkpoints = tree_of(episode, await self._episodes.checkpoints.list(partial(may_list, request)))
        except Unimplemented:
            checkpoints = []
        timeline = self._history.timeline_of(episode_id)
        return web.json_response(episode_detail(episode, facts, timeline, checkpoints))

    async def _recordings(self, request: web.Request) -> web.Response:
        """Return a page of the recordings that the caller may see."""
        if self._replays is None:
            raise _not_found("recordings: this daemon does not record; set recording.directory")
        try:
            page = await self._replays.page(request.query, may_see=lambda owner: may_list(request, owner))
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        return web.json_response(page)

    async def _recording(self, request: web.Request) -> web.Response:
        """Return what a replay needs: steps, and when each frame was recorded."""
        replays, episode_id = await self._replay(request)
        return web.json_response(await replays.detail(episode_id))

    async def _frame(self, request: web.Request) -> web.Response:
        """Return a frame of a recording as JPEG."""
        replays, episode_id = await self._replay(request)
        try:
            index = int(request.match_info["index"])
            jpeg = await replays.jpeg(episode_id, index)
        except (RecordingUnreadable, ValueError) as error:
            raise _not_found(str(error)) from error
        return web.Response(body=jpeg, content_type="image/jpeg")

    async def _video(self, request: web.Request) -> web.StreamResponse:
        """Return a recording as MP4. Making it takes seconds to minutes, and ends when the page no longer waits."""
        replays, episode_id = await self._replay(request)

        def is_wanted() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        with TemporaryDirectory(prefix="envd-video-") as directory:
            path = Path(directory) / f"{episode_id}.mp4"
            try:
                await replays.video(episode_id, path, is_wanted=is_wanted)
            except RecordingUnreadable as error:
                raise _not_found(str(error)) from error
            except ConfigError as error:
                raise web.HTTPNotImplemented(text=f"{error}\n") from error
            except RetryableError as error:
                raise web.HTTPServiceUnavailable(text=f"recording {episode_id}: {error}\n") from error
            response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "video/mp4"})
            response.content_length = path.stat().st_size
            with suppress(ConnectionResetError), path.open("rb") as file:
                await response.prepare(request)
                while chunk := file.read(_VIDEO_CHUNK_BYTES):
                    await _write(request, response, chunk)
        return response

    async def _replay(self, request: web.Request) -> tuple[PageReplays, str]:
        """Return the replays, and the episode of a request that may see it."""
        episode_id = request.match_info["id"]
        if self._replays is None:
            raise _not_found(f"recording {episode_id}: this daemon does not record; set recording.directory")
        try:
            owner = await self._replays.owner(episode_id)
        except RecordingUnreadable as error:
            raise _not_found(str(error)) from error
        if not may_list(request, owner):
            raise _not_found(f"recording {episode_id}: not found")
        return self._replays, episode_id


async def _write(request: web.Request, response: web.StreamResponse, message: bytes) -> None:
    """Write to a page. Raises: ConnectionResetError: it was closed, or takes no bytes and was disconnected."""
    try:
        async with asyncio.timeout(_STALL_S):
            await response.write(message)
    except TimeoutError:
        logger.info("console: a page took no bytes for %.0f s and was disconnected", _STALL_S)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from None


def _selection(body: bytes) -> tuple[list[str], str, bool]:
    """Return the tiles, the full view that a page selects, and whether its person acts. Raises: HTTPBadRequest."""
    with suppress(ValueError):
        match from_json(body):
            case {"tiles": [*tiles], "full": str(full), **more} if all(isinstance(tile, str) for tile in tiles):
                return tiles, full, more.get("live") is True
    raise web.HTTPBadRequest(text='malformed body; send {"tiles": [EPISODE_ID, ...], "full": EPISODE_ID or ""}\n')


def _not_found(text: str) -> web.HTTPNotFound:
    return web.HTTPNotFound(text=text + "\n")


def _file_handler(name: str, content_type: str) -> Handler:
    body = (files("envd.console") / "static" / name).read_bytes()

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return serve
