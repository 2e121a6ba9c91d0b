"""Read the requests of one rollout process for an engine, in a process of its own.

HTTP, JSON and pictures hold the interpreter for 3.7 ms of a request. In the process that samples, that alone would
bound an engine to 270 replies a second.
"""

import asyncio
import contextlib
import hashlib
from asyncio import Future
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.learn import LearnError
from trainer.learn.server import GenerateServer, answer_of, picture_of

#: Decoded pictures, half a megabyte each in every process, that are kept for requests with the same one. Decoding takes
#: 1.7 ms; of 136 requests of seven groups, 88 repeated a picture.
_FRAMES_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a policy reads."""

    checkpoint: Path
    image_px: tuple[int, int]
    image_id: int
    image_token_count: int
    place_count: int
    """Places for pictures: requests that wait or are answered at one time."""

    @property
    def pictures_shape(self) -> tuple[int, int, int, int]:
        """Shape of a file of pictures, uint8: (places, height, width, 3)."""
        width, height = self.image_px
        return self.place_count, height, width, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request, for the engine. Its picture lies in the file of pictures until the reply comes."""

    picture: bytes
    """Digest of the picture as it was sent."""
    ids: bytes
    """Tokens (int32), with a placeholder for each token of the image. Lists of them took half of the engine's time."""
    limit: int
    temperature: float
    place: int = -1
    """Index of the picture in the file. It identifies the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReply:
    """The engine's reply to a request."""

    place: int
    ids: list[int]
    log_probs: list[float]
    is_complete: bool
    weight_version: int
    failure: str = ""


class Front(GenerateServer):
    """HTTP server of one port, whose replies come through a pipe. Use as a context manager."""

    def __init__(self, reads: Reads, pipe: Connection, pictures: Path) -> None:
        """Entering starts the server.

        Args:
            pictures: File of `reads.pictures_shape`, which the engine reads. With pictures in the pipe, short
                operations of the thread that samples took 4.5 us instead of 2.9 at 400 requests a second.
        """
        from tokenizers import Tokenizer  # noqa: PLC0415 -- of the extra `learn`

        super().__init__()
        self._reads, self._pipe = reads, pipe
        self._tokenizer = Tokenizer.from_file(str(reads.checkpoint / "tokenizer.json"))
        self._pictures = np.memmap(pictures, np.uint8, "r+", shape=reads.pictures_shape)
        # The last one that became free first: its memory is in use already.
        self._places: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for place in reversed(range(reads.place_count)):
            self._places.put_nowait(place)
        self._unanswered: dict[int, Future[EngineReply]] = {}

    async def generate(self, payload: Mapping[str, Any], *, is_aborted: Callable[[], bool]) -> dict[str, Any]:
        """Answer a request. Raises: LearnError: It is malformed, or sampling failed."""
        frame_HW3, request = self._read(payload)
        request = replace(request, place=await self._places.get())
        self._pictures[request.place] = frame_HW3
        answer = self._unanswered[request.place] = asyncio.get_running_loop().create_future()
        self._pipe.send(request)
        reply = await answer
        if reply.failure:
            raise LearnError(reply.failure)
        return answer_of(
            self._tokenizer.decode(reply.ids, skip_special_tokens=False),
            reply.ids,
            reply.log_probs,
            finish="abort" if is_aborted() else "stop" if reply.is_complete else "length",
            prompt_tokens=len(request.ids) // np.dtype(np.int32).itemsize,
            weight_version=str(reply.weight_version),
        )

    def pass_replies(self) -> None:
        """Pass replies on until the engine ends."""
        with contextlib.suppress(EOFError, OSError):  # the engine was killed
            while (reply := self._pipe.recv()) is not None:
                self._thread.loop.call_soon_threadsafe(self._pass, reply)

    def _pass(self, reply: EngineReply) -> None:
        self._places.put_nowait(reply.place)
        answer = self._unanswered.pop(reply.place)
        if not answer.done():  # the client may be gone
            answer.set_result(reply)

    def _read(self, payload: Mapping[str, Any]) -> tuple[npt.NDArray[np.uint8], EngineRequest]:
        """Decode a picture and its request. Raises: LearnError: It has not exactly one image of the right size."""
        reads = self._reads
        uris, ids = payload.get("image_data") or [], payload["input_ids"]
        if len(uris) != 1 or ids.count(reads.image_id) != 1:
            raise LearnError(f"request: {len(uris)} images; a row must hold one: set images_per_row to 1")
        frame_HW3, digest = _frame(uris[0])
        height, width, _ = frame_HW3.shape
        if (width, height) != reads.image_px:
            raise LearnError(f"request: an image of {(width, height)} pixels; the policy reads {reads.image_px}")
        at, sampling = ids.index(reads.image_id), payload["sampling_params"]
        return frame_HW3, EngineRequest(
            picture=digest,
            ids=np.array([*ids[:at], *[reads.image_id] * reads.image_token_count, *ids[at + 1 :]], np.int32).tobytes(),
            limit=int(sampling["max_new_tokens"]),
            temperature=float(sampling.get("temperature", 1.0)),
        )


@lru_cache(maxsize=_FRAMES_KEPT)
def _frame(uri: str) -> tuple[npt.NDArray[np.uint8], bytes]:
    """Decode a picture: (height, width, 3), and the digest of its text."""
    frame_HW3 = np.array(picture_of(uri).convert("RGB"))
    return frame_HW3, hashlib.blake2b(uri.encode(), digest_size=16).digest()


def serve(pipe: Connection, reads: Reads, pictures: Path) -> None:
    """Serve until the engine ends: send the port, then requests."""
    with Front(reads, pipe, pictures) as front:
        pipe.send(front.ports[0])
        front.pass_replies()
