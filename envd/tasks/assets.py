"""The asset cache: files that tasks need but do not contain, downloaded to the host ahead of time.

Guests get copies and cannot reach the cache. A file is stored under its digest and found by its URL; the digest is
verified on every read.
"""

import asyncio
import hashlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from ipaddress import ip_address
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import ValidationError

from envd.base.aio import shielded
from envd.base.errors import EnvdError
from envd.desktop.allow_list import is_public
from envd.tasks.fields import AssetRef, Model, Sha256

if TYPE_CHECKING:
    import aiohttp

MAX_ASSET_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
_PART = ".part-"


class AssetMissing(EnvdError, reason="ASSET_MISSING"):
    """A file that a task needs is not in the cache, or has the wrong digest."""


class _CachedFile(Model):
    """The file that was downloaded from a URL."""

    url: str
    sha256: Sha256
    size_bytes: int


class AssetCache:
    """The files in one directory. Several daemons may share it."""

    def __init__(self, directory: Path, *, max_bytes: int = MAX_ASSET_BYTES) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._files = directory / "sha256"
        self._names = directory / "url"

    def find(self, ref: AssetRef) -> Path:
        """Return the path of a file, without reading it.

        Raises:
            AssetMissing: It is missing or has the wrong digest; says how to get it.
        """
        try:
            digest = _CachedFile.model_validate_json(self._name(ref.url).read_bytes()).sha256
        except FileNotFoundError:
            raise AssetMissing(f"{ref.url}: not in the cache; run `envd tasks fetch`") from None
        except (OSError, ValidationError) as error:
            raise AssetMissing(f"{ref.url}: malformed cache entry; run `envd tasks fetch`") from error
        if ref.sha256 and digest != ref.sha256:
            raise AssetMissing(f"{ref.url}: the cache has sha256 {digest}, the task needs {ref.sha256}")
        path = self._files / digest
        if not path.is_file():
            raise AssetMissing(f"{ref.url}: its file is missing from the cache; run `envd tasks fetch`")
        return path

    def has(self, ref: AssetRef) -> bool:
        with suppress(AssetMissing):
            self.find(ref)
            return True
        return False

    def read(self, ref: AssetRef) -> bytes:
        """Return a file's bytes. Raises: AssetMissing: See `find`; or its content has changed."""
        path = self.find(ref)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.name:
            raise AssetMissing(f"{ref.url}: {path} has changed; remove it and run `envd tasks fetch`")
        return data

    async def fetch(self, ref: AssetRef, http: "aiohttp.ClientSession") -> int:
        """Download a file and return its size in bytes. On failure the cache is unchanged.

        Raises:
            AssetMissing: The download failed, is larger than 1 GiB, or has the wrong digest.
        """
        for directory in (self._files, self._names):
            directory.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        with self._locked(LOCK_SH):
            with tempfile.NamedTemporaryFile(dir=self._files, prefix=_PART) as part:
                digest, size_bytes = await _download(ref.url, part, http, max_bytes=self._max_bytes)
                if ref.sha256 and digest != ref.sha256:
                    raise AssetMissing(f"{ref.url}: sha256 is {digest}, the task needs {ref.sha256}")
                _publish(part, self._files / digest)
            entry = _CachedFile(url=ref.url, sha256=digest, size_bytes=size_bytes)
            with tempfile.NamedTemporaryFile(dir=self._names, prefix=_PART) as part:
                part.write(entry.model_dump_json().encode())
                _publish(part, self._name(ref.url))
        return size_bytes

    def remove_leftovers(self) -> None:
        """Remove the incomplete files of killed processes, unless a download runs, in any process."""
        with suppress(BlockingIOError, FileNotFoundError), self._locked(LOCK_EX | LOCK_NB):
            for part in self.directory.glob(f"*/{_PART}*"):
                part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, operation: int) -> Iterator[None]:
        """Lock the directory, exclusively to remove leftovers (milliseconds) or shared to write files."""
        handle = os.open(self.directory, os.O_RDONLY)
        try:
            flock(handle, operation)
            yield
        finally:
            os.close(handle)

    def _name(self, url: str) -> Path:
        return self._names / f"{hashlib.sha256(url.encode()).hexdigest()}.json"


@asynccontextmanager
async def open_http(*, timeout_s: float) -> AsyncIterator["aiohttp.ClientSession"]:
    """Yield a session for downloads that uses the host's proxy settings. `timeout_s` limits each download."""
    # Importing aiohttp takes 0.25 s, and most commands do not download.
    import aiohttp  # noqa: PLC0415

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(trust_env=True, timeout=timeout, trace_configs=[trace]) as http:
        yield http


async def _check_redirect(_session: object, _context: object, redirect: "aiohttp.TraceRequestRedirectParams") -> None:
    """Refuse a redirect to another host if that one has a private address; only tasks may name such hosts.

    Raises:
        ValueError: An address of the other host is not public.
    """
    from yarl import URL  # noqa: PLC0415 -- as aiohttp

    target = redirect.url.join(URL(redirect.response.headers.get("Location", "")))
    if target.host == redirect.url.host:
        return
    try:
        found = await asyncio.get_running_loop().getaddrinfo(target.host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # The request fails, unless it goes through a proxy, which resolves the name.
        return
    inner = next((str(address[0]) for *_, address in found if not is_public(ip_address(address[0]))), None)
    if inner is not None:
        redirect.response.close()
        raise ValueError(
            f"redirected to {target.host}, whose address {inner} is not public; name it in the task instead"
        )


def _publish(part: IO[bytes], path: Path) -> None:
    """Move a complete file to its path atomically, even if another daemon does the same concurrently."""
    part.flush()
    os.fchmod(part.fileno(), 0o444)
    linked = f"{part.name}.complete"
    os.link(part.name, linked)
    os.replace(linked, path)


async def _download(url: str, file: IO[bytes], http: "aiohttp.ClientSession", *, max_bytes: int) -> tuple[str, int]:
    import aiohttp  # noqa: PLC0415

    digest, size_bytes = hashlib.sha256(), 0
    try:
        async with http.get(url, raise_for_status=True) as response:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > max_bytes:
                    raise AssetMissing(f"{url}: larger than {max_bytes} bytes")
                digest.update(chunk)
                await shielded(asyncio.to_thread(file.write, chunk))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise AssetMissing(f"{url}: cannot be downloaded: {error or type(error).__name__}") from error
    return digest.hexdigest(), size_bytes
