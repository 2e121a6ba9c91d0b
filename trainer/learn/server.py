"""SGLang's `/generate` and the routes that slime calls on its router and engines, without a model.

The server has an event loop in a thread of its own. Each port has its own aborts and load.
"""

import base64
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote, urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from cuaenv.loop_thread import LoopThread
from trainer.learn import LearnError

if TYPE_CHECKING:
    from PIL import Image

#: aiohttp would log a traceback for each connection of a client that tries HTTP/2 first.
_logger = logging.getLogger(f"{__name__}.requests")
_logger.addFilter(lambda record: record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError))

_MAX_REQUEST_BYTES: Final = 256 << 20
_FILE: Final = "file://"


def picture_of(uri: str) -> "Image.Image":
    """Return a picture of a request for Pillow: a file, a data URI or bare base64. Raises: OSError, ValueError."""
    from PIL import Image  # noqa: PLC0415

    path = file_of(uri)
    return Image.open(io.BytesIO(path.read_bytes() if path else base64.b64decode(uri.rpartition(",")[2])))


def file_of(uri: str) -> Path | None:
    """Return the file that a picture of a request names; None if it carries its bytes."""
    return Path(unquote(urlsplit(uri).path)) if uri.startswith(_FILE) else None


def answer_of(
    text: str, ids: Sequence[int], log_probs: Sequence[float], *, finish: str, prompt_tokens: int, weight_version: str
) -> dict[str, Any]:
    """Return the response to a request, in SGLang's form."""
    return {
        "text": text,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)],
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": weight_version,
        },
    }


class GenerateServer:
    """Serves `generate` of a subclass on free loopback ports. Use as a context manager."""

    def __init__(self, *, port_count: int = 1, shared_port: int | None = None) -> None:
        """Entering starts the server.

        Args:
            shared_port: The port, which other processes may listen on too; 0 for a free one. None: not shared.
        """
        self.host = "127.0.0.1"
        self.ports: list[int] = []
        self._port_count = port_count
        self._shared_port = shared_port
        self._runners: list[web.AppRunner] = []

    def __enter__(self) -> Self:
        self._thread = LoopThread("engine-http")
        self._thread.start(self._start()).result()
        return self

    def __exit__(self, *_: object) -> None:
        # It cancels requests whose client is gone, which may still wait for their answer.
        self._thread.close(self._end)

    async def generate(self, payload: Mapping[str, Any], *, is_aborted: Callable[[], bool]) -> dict[str, Any]:
        """Answer a request; `is_aborted` turns true when it is aborted. Raises: LearnError: It is malformed."""
        raise NotImplementedError

    def make_app(self) -> web.Application:
        return _app(self.generate)

    async def _start(self) -> None:
        for _ in range(self._port_count):
            runner = web.AppRunner(self.make_app(), access_log=None, logger=_logger, shutdown_timeout=0.1)
            await runner.setup()
            self._runners.append(runner)
            is_shared = self._shared_port is not None
            await web.TCPSite(runner, self.host, self._shared_port or 0, backlog=1024, reuse_port=is_shared).start()
            self.ports.append(runner.addresses[0][1])

    async def _end(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


def _app(generate: Callable[..., Any]) -> web.Application:
    """Return the routes of one port."""
    aborted_count = running_count = 0

    async def list_workers(request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def loads(_: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": running_count, "num_waiting_reqs": 0}]})

    async def abort(_: web.Request) -> web.Response:
        nonlocal aborted_count
        aborted_count += 1
        return web.json_response({})

    async def reply(request: web.Request) -> web.Response:
        nonlocal running_count
        payload, earlier_count = await request.json(), aborted_count
        running_count += 1
        try:
            answer = await generate(payload, is_aborted=lambda: aborted_count != earlier_count)
        except LearnError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        finally:
            running_count -= 1
        return web.json_response(answer)

    app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
    app.router.add_post("/generate", reply)
    app.router.add_post("/abort_request", abort)
    app.router.add_get("/workers", list_workers)
    app.router.add_get("/v1/loads", loads)
    return app
