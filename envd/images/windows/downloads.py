"""Downloads evaluation media and the virtio drivers from their publishers, with a pinned sha256 each.

Evaluations need no product key; their licence terms are Microsoft's. A download continues where an earlier one stopped.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import aiohttp

from envd.base.errors import ImageError
from envd.images.windows.editions import Release
from envd.images.windows.plan import Progress

_CHUNK_BYTES = 1 << 20
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 30.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file to download."""

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


#: Evaluation media in English.
EVALUATIONS: Mapping[Release, Download] = {
    Release(name): Download(**each)
    for name, each in json.loads((files("envd.images.windows") / "evaluations.json").read_text()).items()
}
VIRTIO_WIN = Download(
    url="https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/archive-virtio/virtio-win-0.1.285-1/"
    "virtio-win-0.1.285.iso",
    sha256="e14cf2b94492c3e925f0070ba7fdfedeb2048c91eea9c5a5afb30232a3976331",
    size_bytes=789_645_312,
)


async def download(wanted: Download, directory: Path, *, progress: Progress) -> Path:
    """Return the file in `directory`, downloaded unless it is there.

    An interrupted download keeps what it has, in a file whose name ends in `.part`.

    Raises:
        ImageError: The server cannot be reached or refuses, or the file is not the expected one.
    """
    file = directory / wanted.name
    # It was checked before it got this name.
    if file.exists():
        return file
    part = file.with_name(file.name + ".part")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        await _fetch(wanted, part, progress)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ImageError(
            f"download {wanted.url}: {error or 'no response'}; run the command again to continue, or download the file "
            "with a browser and pass --iso or --virtio-win"
        ) from error
    except OSError as error:
        raise ImageError(
            f"download {wanted.url}: {part} cannot be written: {error.strerror}; free some space"
        ) from error
    progress(f"checking {wanted.name}", 1.0)
    with part.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wanted.sha256:
        part.unlink()
        raise ImageError(
            f"download {wanted.url}: sha256 is {digest}, not {wanted.sha256}; the publisher replaced the file, or the "
            "download was damaged: try again, or pass --iso or --virtio-win"
        )
    part.rename(file)
    return file


async def _fetch(wanted: Download, part: Path, progress: Progress) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
    done = part.stat().st_size if part.exists() else 0
    if done >= wanted.size_bytes:
        return
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True, trust_env=True) as session,
        session.get(wanted.url, headers={"Range": f"bytes={done}-"} if done else {}) as response,
    ):
        # A server that ignores the range sends the file from its beginning.
        resumes = response.status == 206
        done = done if resumes else 0
        with part.open("ab" if resumes else "wb") as stream:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                stream.write(chunk)
                done += len(chunk)
                progress(f"downloading {wanted.name}", min(1.0, done / wanted.size_bytes))
