"""Connections to SGLang's engines. A request repeats all pictures of its row.

As JSON in the rollout's event loop, 15 MB of them would stop all other episodes for 50 ms; a thread of its own sends
them as they were encoded, once per picture.
"""

import asyncio
import atexit
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson

from cuaenv.loop_thread import LoopThread

#: Longest part of a request that is copied to join it with others.
_JOINED_BYTES: Final = 1 << 18
#: Servers close a connection after 5 s; a request on one that is being closed fails.
_KEEP_ALIVE_S: Final = 4.0


class EngineError(Exception):
    """The engine refused a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.response = self
        """The error itself: exceptions of slime's client have status and text there."""
        self.status_code = status
        self.text = text


class EngineClient:
    """Connections to engines, for all event loops of the process. It has no timeout."""

    def __init__(self) -> None:
        """Start the thread, which ends with the process."""
        atexit.register(self.close)
        self._session: aiohttp.ClientSession | None = None
        self._thread = LoopThread("engine-client")

    def close(self) -> None:
        """Close the connections and end the thread."""
        atexit.unregister(self.close)
        self._thread.close(self._end)

    async def post(self, url: str, payload: Mapping[str, Any], *, headers: Mapping[str, str] | None) -> Any:
        """Return the response to a request. If the caller is cancelled, the connection is closed.

        Args:
            url: Address of `/generate`.
            payload: JSON values; `image_data` are encoded URIs of ASCII characters.
            headers: More headers.

        Raises:
            EngineError: The engine refused the request.
            aiohttp.ClientError: There was no response.
            ValueError: The response is not JSON.
        """
        return await asyncio.wrap_future(self._thread.start(self._post(url, payload, headers or {})))

    async def _end(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, payload: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        if self._session is None:
            # slime limits the number of requests.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        parts = _parts(payload)
        size = str(sum(map(len, parts)))
        more = {**headers, "Content-Type": "application/json", "Content-Length": size}
        body: Any = parts[0] if len(parts) == 1 else _each(parts)
        async with self._session.post(url, data=body, headers=more) as response:
            if not response.ok:
                raise EngineError(response.status, await response.text())
            return orjson.loads(await response.read())


def _parts(payload: Mapping[str, Any]) -> Sequence[bytes]:
    """Return a request as JSON, in parts to send one after the other; large pictures are not copied."""
    images: Sequence[bytes] = payload.get("image_data", ())
    fields = {key: value for key, value in payload.items() if key != "image_data"}
    rest = orjson.dumps(fields)
    if not images:
        return [rest]
    parts, short = list[bytes](), [rest[:-1], b',"image_data":["']
    for number, image in enumerate(images):
        if number:
            short.append(b'","')
        if len(image) < _JOINED_BYTES:
            short.append(image)
        else:
            parts += [b"".join(short), image]
            short = []
    return [*parts, b"".join([*short, b'"]}'])]


async def _each(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
