"""Ports of a sandbox by its host name: HTTP requests and WebSockets to a port of the guest's loopback."""

import asyncio
from typing import Final

import aiohttp
from aiohttp import web

from envd.integrations.compat.e2b import rpc
from envd.integrations.compat.e2b.rpc import RpcError
from envd.integrations.compat.e2b.sandboxes import Sandbox

_CHUNK_BYTES: Final = 64 << 10
#: Headers of one connection (RFC 9110, 7.6.1), and those that this server or client sets itself.
_HOP: Final = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions",
    "sec-websocket-accept",
))  # fmt: skip
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=30)


async def forward(request: web.Request, sandbox: Sandbox, port: int) -> web.StreamResponse:
    """Answer a request as the guest's program on a port does. Raises: RpcError, EnvError."""
    episode = sandbox.episode
    if episode is None or not 1 <= port <= 65_535:
        raise RpcError("unavailable", f"port {port} of the sandbox {sandbox.sandbox_id} was not found")
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
    response = web.StreamResponse()
    async with (
        episode.forward(port) as forwarded,
        # No redirects, cookies or proxies: a guest could point us at other services of this host.
        aiohttp.ClientSession(timeout=_TIMEOUT, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as http,
    ):
        url = f"http://{forwarded.address}{request.raw_path}"
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await _web_socket(request, http, url, headers)
            body = request.content.iter_chunked(_CHUNK_BYTES) if request.body_exists else None
            async with http.request(request.method, url, headers=headers, data=body, allow_redirects=False) as answer:
                response.set_status(answer.status, answer.reason)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP:
                        response.headers.add(name, value)
                await response.prepare(request)
                async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, ValueError) as error:
            if response.prepared:
                return rpc.cut_off(request, response)
            reason = forwarded.error or error
            text = f"The sandbox is running but port is not open: port {port}: {reason}"
            body_of_error = {"sandboxId": sandbox.sandbox_id, "message": text, "port": port, "code": 502}
            return web.json_response(body_of_error, status=502)


async def _web_socket(
    request: web.Request, http: aiohttp.ClientSession, url: str, headers: list[tuple[str, str]]
) -> web.StreamResponse:
    protocols = [each.strip() for each in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if each.strip()]
    kept = [each for each in headers if each[0].lower() != "sec-websocket-protocol"]
    async with http.ws_connect(url, headers=kept, protocols=protocols) as guest:
        caller = web.WebSocketResponse(protocols=[guest.protocol] if guest.protocol else ())
        await caller.prepare(request)
        copies = {asyncio.create_task(_copy(caller, guest)), asyncio.create_task(_copy(guest, caller))}
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            await caller.close()
        return caller


_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _copy(source: _Socket, target: _Socket) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is aiohttp.WSMsgType.BINARY:
            await target.send_bytes(message.data)
