"""Downloads evaluation media and the virtio drivers from their publishers, with a pinned sha256 each.

Evaluations need no product key; their licence terms are Microsoft's. A download continues where an earlier one stopped.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from envd.base.errors import ImageError
from envd.images.windows.editions import Release
from envd.images.windows.plan import Progress

_CHUNK_BYTES = 1 << 20
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 30.0, 60.0
_MICROSOFT = "https://software-static.download.prss.microsoft.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file to download."""

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        """Its file name."""
        return self.url.rpartition("/")[2]


#: Evaluation media in English.
EVALUATIONS: Mapping[Release, Download] = {
    Release.WINDOWS_10: Download(
        url=f"{_MICROSOFT}/dbazure/988969d5-f34g-4e03-ac9d-1f9786c66750/"
        "19045.2006.220908-0225.22h2_release_svc_refresh_CLIENTENTERPRISEEVAL_OEMRET_x64FRE_en-us.iso",
        sha256="ef7312733a9f5d7d51cfa04ac497671995674ca5e1058d5164d6028f0938d668",
        size_bytes=5_550_497_792,
    ),
    Release.WINDOWS_11: Download(
        url=f"{_MICROSOFT}/dbazure/888969d5-f34g-4e03-ac9d-1f9786c66749/"
        "26200.6584.250915-1905.25h2_ge_release_svc_refresh_CLIENTENTERPRISEEVAL_OEMRET_x64FRE_en-us.iso",
        sha256="a61adeab895ef5a4db436e0a7011c92a2ff17bb0357f58b13bbc4062e535e7b9",
        size_bytes=7_092_807_680,
    ),
    Release.SERVER_2022: Download(
        url=f"{_MICROSOFT}/sg/download/888969d5-f34g-4e03-ac9d-1f9786c66749/SERVER_EVAL_x64FRE_en-us.iso",
        sha256="3e4fa6d8507b554856fc9ca6079cc402df11a8b79344871669f0251535255325",
        size_bytes=5_044_094_976,
    ),
    Release.SERVER_2025: Download(
        url=f"{_MICROSOFT}/dbazure/998969d5-f34g-4e03-ac9d-1f9786c66749/"
        "26100.32230.260111-0550.lt_release_svc_refresh_SERVER_EVAL_x64FRE_en-us.iso",
        sha256="7b052573ba7894c9924e3e87ba732ccd354d18cb75a883efa9b900ea125bfd51",
        size_bytes=8_152_356_864,
    ),
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
            f"download {wanted.url}: has sha256 {digest}, not {wanted.sha256}; the publisher replaced the file, or the "
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
