"""The same certificates and tokens for HTTP servers as for gRPC."""

import ssl
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from envd.api.security.access import TRUSTED, Caller, Scope, bearer_token
from envd.api.security.guard import CallGuard
from envd.api.security.secret_files import Reloaded
from envd.api.security.tls import server_context
from envd.api.security.tokens import TokenTable
from envd.base.config import SecurityConfig
from envd.base.config_values import is_local
from envd.base.errors import RateLimited, Unauthenticated

_CALLER = web.RequestKey("envd_caller", Caller)
_ADMIT = web.RequestKey[Callable[[], Caller]]("envd_admit")


def tls_context(security: SecurityConfig, *, on_stale: Callable[[bool], None]) -> ssl.SSLContext | None:
    """Return a context whose new connections use the newest valid files; None without TLS.

    Args:
        on_stale: Called after each change of the files with whether older ones are still in use.

    Raises:
        ConfigError: A file is not usable.
    """
    cert, key, client_ca = security.tls_cert, security.tls_key, security.client_ca
    if cert is None or key is None:
        return None
    paths = [cert, key] + ([client_ca] if client_ca else [])
    contexts = Reloaded(
        "security.tls_cert", paths, lambda: server_context(cert=cert, key=key, client_ca=client_ca), on_stale=on_stale
    )
    first = contexts.get()

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = contexts.get()

    first.sni_callback = renew
    return first


def require_token(tokens: Reloaded[TokenTable] | None, scope: Scope, *, exempt: Iterable[str] = ()) -> Middleware:
    """Return a middleware that answers 401 without a valid token, and 403 if its scope is too small."""
    free = frozenset(exempt)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if tokens is not None and request.path not in free:
            request[_ADMIT] = lambda: _authorize(tokens.get(), request, scope)
            request[_CALLER] = request[_ADMIT]()
        return await handler(request)

    return check


def limit_rate(guard: CallGuard) -> Middleware:
    """Return a middleware that answers 429 above the call rate of a token, or of a host without a valid one."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller, peer = guard.find_caller(_authorization(request)), peer_of(request)
        try:
            if caller is None:
                guard.count_unauthenticated(peer)
            else:
                guard.count(caller, request.path, peer)
        except RateLimited as error:
            retry_after_s = max(1, round(error.retry_after_s))
            raise web.HTTPTooManyRequests(text=f"{error}\n", headers={"Retry-After": str(retry_after_s)}) from error
        return await handler(request)

    return check


def peer_of(request: web.Request) -> str:
    """Return the caller's address in the form of grpc's, so that both count against one limit."""
    return f"ipv4:{request.remote}:0"


def is_admitted(request: web.Request) -> bool:
    """Return whether the token of a request that `require_token` admitted is still valid; for long responses."""
    if _ADMIT not in request:
        return True
    try:
        request[_CALLER] = request[_ADMIT]()
    except web.HTTPClientError:
        return False
    return True


def may_list(request: web.Request, owner: str) -> bool:
    """Return whether the caller of a request that `require_token` admitted may see an episode of `owner`."""
    caller: Caller = request.get(_CALLER, TRUSTED)
    return caller.may_list(owner)


def caller_of(request: web.Request) -> Caller:
    """Return the caller of a request that `require_token` admitted."""
    caller: Caller = request.get(_CALLER, TRUSTED)
    return caller


def caller_name(request: web.Request) -> str:
    """Return the name of the caller's token; empty where every caller is trusted."""
    return caller_of(request).name


def require_local_host_name() -> Middleware:
    """Return a middleware that answers 421 unless the request names this host by a loopback name.

    Without tokens a page from elsewhere could otherwise read from a loopback port, once its own name resolves to
    127.0.0.1 (DNS rebinding).
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Names below `localhost` are loopback ones too (RFC 6761).
        host = "localhost" if (request.url.host or "").endswith(".localhost") else request.url.host
        if not is_local(f"{host and _bracketed(host)}:0"):
            raise web.HTTPMisdirectedRequest(
                text=f"host {request.host!r}: without tokens only 127.0.0.1, localhost and [::1] are answered; use one"
                " of them, or set security.tokens_file\n"
            )
        return await handler(request)

    return check


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _authorization(request: web.Request) -> list[tuple[str, str]]:
    return [("authorization", value) for value in request.headers.getall("Authorization", [])]


def _authorize(tokens: TokenTable, request: web.Request, scope: Scope) -> Caller:
    try:
        caller = tokens.find(bearer_token(_authorization(request)))
    except Unauthenticated:
        caller = None
    if caller is None:
        raise web.HTTPUnauthorized(
            text="a valid token is missing; send `Authorization: Bearer TOKEN`\n",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if caller.scope < scope:
        raise web.HTTPForbidden(
            text=f"token {caller.name}: scope {caller.scope.word} is too small; {scope.word} is needed\n"
        )
    return caller
