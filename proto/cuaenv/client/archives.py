"""Write checkpoints of a host to files, and send such files to another host."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import grpc

from cuaenv.client.connection import DaemonConnection, sent_status
from cuaenv.v1 import env_pb2

_CHUNK_BYTES: Final = 1 << 20


async def export_to(connection: DaemonConnection, checkpoint_id: str, path: Path, *, timeout: timedelta) -> int:
    """Write the archive of a checkpoint to `path` when it is complete; returns its bytes. Raises: EnvError, OSError."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    request = env_pb2.ExportCheckpointRequest(checkpoint_id=checkpoint_id)
    # It contains the guest's memory, with everything that was typed.
    file = await asyncio.to_thread(os.open, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as archive:
            async for response in connection.stub().ExportCheckpoint(request, timeout=timeout.total_seconds()):
                await asyncio.to_thread(archive.write, response.data)
            size_bytes = archive.tell()
        part.rename(path)
    except grpc.aio.AioRpcError as failure:
        raise connection.error_of(failure) from None
    finally:
        part.unlink(missing_ok=True)
    return size_bytes


async def import_from(connection: DaemonConnection, path: Path, *, timeout: timedelta) -> env_pb2.Checkpoint:
    """Send an archive, and return the checkpoint that the host stored. Raises: EnvError, OSError."""

    async def pieces() -> AsyncIterator[env_pb2.ImportCheckpointRequest]:
        while data := await asyncio.to_thread(archive.read, _CHUNK_BYTES):
            yield env_pb2.ImportCheckpointRequest(data=data)

    # Opened before the call: a file that cannot be read is an error of its own, not one of the stream.
    with path.open("rb") as archive:
        call: Any = connection.stub().ImportCheckpoint(pieces(), timeout=timeout.total_seconds())
        sent = sent_status(call)
        try:
            response = await call
        except grpc.aio.AioRpcError as failure:
            raise connection.error_of(sent(failure)) from None
    return response.checkpoint  # type: ignore[no-any-return]
