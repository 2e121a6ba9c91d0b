"""A checkpoint as a stream of bytes, for another host: a header with the manifest, then its files in order.

The header's digest covers the manifest, whose digests cover the files, so every damaged byte is found.
"""

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import xxhash
from pydantic import ValidationError

from cuaenv.problems import problem_of
from envd.base.errors import CheckpointCorrupt, InvalidRequest
from envd.episodes.checkpoints.manifest import Manifest, StoredFile, parse_manifest
from envd.episodes.checkpoints.store import MANIFEST, in_thread, is_id

#: Bytes of each message.
CHUNK_BYTES: Final = 1 << 20
_MAGIC: Final = b"envd checkpoint\n"
_LENGTH: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 16
_MAX_MANIFEST_BYTES: Final = 1 << 20
_FILE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: A sender that pauses for longer is gone.
_IDLE_S: Final = 60.0


def archived(checkpoint: Manifest, directory: Path) -> Generator[bytes, None, None]:
    """Yield the archive of a checkpoint's files. Blocks. Raises: OSError: only before the first piece."""
    manifest = checkpoint.model_dump_json().encode()
    with ExitStack() as stack:
        # All at first: files that are open can be read to the end, also while the checkpoint is being deleted.
        files = [stack.enter_context((directory / name).open("rb")) for name in checkpoint.files]
        yield _MAGIC + _LENGTH.pack(len(manifest)) + manifest + xxhash.xxh3_128(manifest).digest()
        for file in files:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


class ArchiveReader:
    """Reads an archive from pieces of any size."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._unread = b""

    async def manifest(self) -> Manifest:
        """Read the header. Raises: InvalidRequest: it is not an archive's; CheckpointCorrupt: it is damaged."""
        head = await self._exactly(len(_MAGIC) + _LENGTH.size)
        (length,) = _LENGTH.unpack(head[len(_MAGIC) :])
        if not head.startswith(_MAGIC) or length > _MAX_MANIFEST_BYTES:
            raise InvalidRequest("data", "is not a checkpoint's archive; send the bytes of ExportCheckpoint")
        text = await self._exactly(length)
        if await self._exactly(_DIGEST_BYTES) != xxhash.xxh3_128(text).digest():
            raise CheckpointCorrupt("archive of a checkpoint: its manifest is damaged; export it again")
        try:
            manifest = parse_manifest(text)
        except ValueError as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            where = ".".join(map(str, first["loc"])) if first and first["loc"] else "manifest"
            problem = problem_of(first) if first else error
            raise InvalidRequest(
                "data",
                f"is an archive that this version of envd does not read ({where[:100]}: {problem}); use the"
                " same version on both hosts",
            ) from error
        names = manifest.files.keys()
        is_safe = is_id(manifest.checkpoint_id) and MANIFEST not in names and all(map(_FILE_NAME.fullmatch, names))
        if not is_safe or manifest.expire_time <= manifest.create_time:
            raise InvalidRequest("data", "has an id, a lifetime or files that no checkpoint has")
        return manifest

    async def read_file(self, path: Path, expected: StoredFile) -> None:
        """Write the next file to `path`. Raises: OSError; CheckpointCorrupt: it differs from the manifest."""
        digest, left = xxhash.xxh3_128(), expected.size_bytes
        with path.open("xb") as file:
            while left > 0:
                piece = await self._upto(left)
                if not piece:
                    raise _cut()
                digest.update(piece)
                await in_thread(file.write, piece)
                left -= len(piece)
        if digest.hexdigest() != expected.digest:
            raise CheckpointCorrupt(f"archive of a checkpoint: file {path.name} is damaged; export it again")

    async def require_end(self) -> None:
        """Check that there are no further bytes. Raises: CheckpointCorrupt."""
        if await self._upto(1):
            raise CheckpointCorrupt("archive of a checkpoint: bytes follow its last file; export it again")

    async def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = await self._upto(count - len(found))
            if not piece:
                raise _cut()
            found += piece
        return found

    async def _upto(self, count: int) -> bytes:
        """Return 1 to `count` bytes; none at the end."""
        while not self._unread:
            try:
                async with asyncio.timeout(_IDLE_S):
                    self._unread = await anext(self._pieces)
            except StopAsyncIteration:
                return b""
            except TimeoutError:
                raise InvalidRequest("data", f"nothing was sent for {_IDLE_S:g} s; import it again") from None
        piece, self._unread = self._unread[:count], self._unread[count:]
        return piece


def _cut() -> CheckpointCorrupt:
    return CheckpointCorrupt("archive of a checkpoint: it ends early; export it again")
