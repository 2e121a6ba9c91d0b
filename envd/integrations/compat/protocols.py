"""Shared by the protocols: routes that are guarded like gRPC calls, JSON bodies, and errors as HTTP statuses.

An error is always a status of 400 or above with `{"error": text, "reason": REASON}`, and never contains a score.
"""

import logging
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from cuaenv.problems import problem_of
from envd.api.security.access import Caller
from envd.api.security.guard import Guard
from envd.api.security.http import peer_of
from envd.api.status import code_of, reason_of
from envd.base import untrusted_json
from envd.base.errors import AccessDenied, EnvdError, InvalidRequest, RateLimited, RetryableError, Unauthenticated
from envd.desktop.observation import EncodedFrame, Keyframe

logger = logging.getLogger(__name__)

#: gRPC codes as HTTP statuses; any other code is 500.
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "UNIMPLEMENTED": 501,
}
_EPISODE = "episode_id"
_TOKEN = "token"  # noqa: S105 -- a name in paths

#: Largest body, except for files of guests.
MAX_BODY_BYTES = 1 << 20

Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    """Base of request bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=False, frozen=True)


class Routes:
    """Adds routes to an application. Each call passes the same checks as a gRPC call.

    The token is a bearer token, the password of basic authentication, the header `x-paas-secret-token`, or a prefix of
    the path, `/token/TOKEN/...`, for clients that can only be given an address.
    """

    def __init__(self, app: web.Application, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    def add(
        self, http_method: str, path: str, handler: Handler, *, method: str, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        """Add a route.

        Args:
            path: Its pattern; `{episode_id}` in it must be an episode of the caller.
            method: The gRPC method with the same rights, such as `Step`.
            max_body_bytes: Largest body; a larger one is refused.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await self._guarded(request.clone(client_max_size=max_body_bytes), handler, method)
            except EnvdError as error:
                return _error(self._guard, request, error)
            except web.HTTPException as error:
                # Such as a body that is too large.
                return json_response({"error": error.text or error.reason, "reason": "BAD_FIELD"}, status=error.status)
            except Exception as error:
                if self._guard.log_text(error, "", peer_of(request)) is not None:
                    logger.exception("%s %s failed", request.method, request.path.rpartition("/")[2])
                text = f"a bug in envd ({type(error).__name__}); its log has the traceback"
                return json_response({"error": text, "reason": "BUG"}, status=500)

        for prefix in ("", f"/token/{{{_TOKEN}}}"):
            self._app.router.add_route(http_method, prefix + path, answer)

    def add_health(self, path: str, describe: Callable[[], dict[str, object]]) -> None:
        """Add a health check, which needs no token."""

        async def answer(request: web.Request) -> web.Response:
            try:
                self._guard.count_health_call(peer_of(request))
            except EnvdError as error:
                return _error(self._guard, request, error)
            return json_response(describe())

        for prefix in ("", f"/token/{{{_TOKEN}}}"):
            self._app.router.add_get(prefix + path, answer)

    async def _guarded(self, request: web.Request, handler: Handler, method: str) -> web.StreamResponse:
        guard, peer = self._guard, peer_of(request)
        try:
            caller = guard.identify(method, [("authorization", f"Bearer {token}") for token in _tokens(request)])
        except Unauthenticated:
            guard.count_unauthenticated(peer)
            raise
        with guard.running_call(caller, method, peer) as running:
            guard.count(caller, method, peer)
            if request.body_exists:
                # Before the body is received. The size of a chunked or compressed one shows only with its end.
                size = None if "Content-Encoding" in request.headers else request.content_length
                running.hold(request.client_max_size if size is None else size)
            self.admit(caller, request.match_info.get(_EPISODE, ""))
            return await handler(request, caller)

    def add_refused(self, path: str, reason: str) -> None:
        """Add a POST route that is part of a protocol and not served."""

        async def refuse(_request: web.Request, _caller: Caller) -> web.Response:
            raise AccessDenied(f"{path}: {reason}")

        self.add("POST", path, refuse, method="Step")

    def add_unknown(self) -> None:
        """Answer 404 to all other paths. Call after all other routes were added."""

        async def answer(request: web.Request) -> web.Response:
            return json_response(
                {"error": f"no route {request.method} of this name", "reason": "NOT_FOUND"}, status=404
            )

        self._app.router.add_route("*", "/{path:.*}", answer)

    def admit(self, caller: Caller, episode_id: str) -> None:
        """Check that an episode is the caller's. Raises: EpisodeNotFound."""
        self._guard.check_owner(caller, episode_id)


async def read_body(request: web.Request, kind: type[B]) -> B:
    """Return a JSON body. Raises: InvalidRequest: It is not an object of that kind."""
    # A page of another origin can send text or a form without asking first, but not JSON.
    if request.content_type != "application/json":
        raise InvalidRequest("Content-Type", f"is {request.content_type!r}; send application/json")
    try:
        content = await untrusted_json.parse(await request.read())
    except ValueError as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("body", "is not a JSON object")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidRequest(field, problem_of(first)) from None


def json_response(content: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.json_response(content, status=status)


def png_of(frame: EncodedFrame) -> bytes:
    """Return the PNG of a frame that was requested whole."""
    if not isinstance(frame.content, Keyframe):
        raise TypeError(f"frame {frame.frame_id} has no whole image")
    return frame.content.data


def base64_png(frame: EncodedFrame) -> str:
    """Return the PNG of a frame in base64."""
    return b64encode(png_of(frame)).decode("ascii")


def _error(guard: Guard, request: web.Request, error: EnvdError) -> web.Response:
    status = _STATUSES.get(code_of(error).name, 500)
    if not isinstance(error, RateLimited) and (text := guard.log_text(error, "", peer_of(request))) is not None:
        # Not the path, which may have a token.
        logger.warning("%s: %s: %s", request.path.rpartition("/")[2], reason_of(error), text)
    response = json_response({"error": str(error), "reason": reason_of(error)}, status=status)
    if isinstance(error, RetryableError):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return response


def _tokens(request: web.Request) -> list[str]:
    """Return every token that a request gives; more than one is refused."""
    found = [request.match_info[_TOKEN]] if _TOKEN in request.match_info else []
    found += request.headers.getall("x-paas-secret-token", [])
    for value in request.headers.getall("Authorization", []):
        scheme, _, rest = value.partition(" ")
        if scheme.lower() == "basic":
            with suppress(Base64Error, UnicodeDecodeError):
                rest = b64decode(rest).decode().partition(":")[2]
        found.append(rest)
    return found
