"""Downloads of media, from an HTTP server on this host."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from envd.base.errors import ImageError
from envd.images.windows.media import EVALUATIONS, VIRTIO_WIN, MediaDownload, Release, download

CONTENT = bytes(range(256)) * 20_000


class Publisher:
    """Serves one file, and records which ranges were requested."""

    def __init__(self) -> None:
        self.ranges: list[str] = []
        self.content = CONTENT
        self.cut_at: int | None = None
        self.ignores_ranges = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        requested = request.headers.get("Range", "")
        self.ranges.append(requested)
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and not self.ignores_ranges else 0
        body = self.content[start:]
        response = web.StreamResponse(status=206 if start else 200, headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        if self.cut_at is not None:
            await response.write(body[: self.cut_at])
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(body)
        return response


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest_asyncio.fixture
async def wanted(publisher: Publisher) -> AsyncIterator[MediaDownload]:
    app = web.Application()
    app.router.add_get("/windows.iso", publisher.serve)
    async with TestServer(app) as server:
        yield MediaDownload(
            url=str(server.make_url("/windows.iso")),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            size_bytes=len(CONTENT),
        )


async def test_a_file_is_downloaded_once(publisher: Publisher, wanted: MediaDownload, tmp_path: Path) -> None:
    reported: list[tuple[str, float]] = []
    for _ in range(2):
        file = await download(wanted, tmp_path / "new", progress=lambda stage, done: reported.append((stage, done)))
        assert file.read_bytes() == CONTENT
    assert publisher.ranges == [""]
    fractions = [done for stage, done in reported if stage == "downloading windows.iso"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["windows.iso"]


@pytest.mark.parametrize("ignores_ranges", [False, True])
async def test_a_download_continues(
    publisher: Publisher, wanted: MediaDownload, tmp_path: Path, ignores_ranges: bool
) -> None:
    publisher.cut_at = 100_000
    with pytest.raises(ImageError, match="again"):
        await download(wanted, tmp_path, progress=lambda *_: None)
    received = (tmp_path / "windows.iso.part").stat().st_size
    assert 0 < received <= 100_000
    publisher.cut_at, publisher.ignores_ranges = None, ignores_ranges
    file = await download(wanted, tmp_path, progress=lambda *_: None)
    assert file.read_bytes() == CONTENT
    assert publisher.ranges == ["", f"bytes={received}-"]


async def test_another_file_than_the_pinned_one_is_not_kept(
    publisher: Publisher, wanted: MediaDownload, tmp_path: Path
) -> None:
    publisher.content = CONTENT[:-1] + b"x"
    with pytest.raises(ImageError, match=rf"not {wanted.sha256}; the publisher replaced the file"):
        await download(wanted, tmp_path, progress=lambda *_: None)
    assert list(tmp_path.iterdir()) == []


async def test_a_server_that_refuses_or_is_absent_is_an_error(wanted: MediaDownload, tmp_path: Path) -> None:
    absent = MediaDownload(url=wanted.url.replace("windows", "absent"), sha256=wanted.sha256, size_bytes=1)
    with pytest.raises(ImageError, match="404"):
        await download(absent, tmp_path, progress=lambda *_: None)
    unreachable = MediaDownload(url="http://127.0.0.1:1/windows.iso", sha256=wanted.sha256, size_bytes=1)
    with pytest.raises(ImageError, match="--iso"):
        await download(unreachable, tmp_path, progress=lambda *_: None)


def test_every_release_has_an_evaluation_by_https_with_a_digest() -> None:
    assert set(EVALUATIONS) == set(Release)
    for each in (*EVALUATIONS.values(), VIRTIO_WIN):
        assert each.url.startswith("https://")
        assert each.name.endswith(".iso")
        assert len(bytes.fromhex(each.sha256)) == 32
        assert each.size_bytes > 500 << 20
