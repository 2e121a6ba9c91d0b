"""A web recording: a WARC file with a response and its request for each exchange. Runs in the web environment.

A request is answered by what was recorded for the same method, URL and body. Of several, the one whose cookies fit
best is taken, and of those the first. Nothing is remembered between requests: the state of a session is in the guest's
cookies, so a fork continues it.
"""

import gzip
import hashlib
import io
import json
import resource
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain
from typing import IO, Any

from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

#: Of a request or a response. The proxy records no larger one.
MAX_BODY_BYTES = 64 << 20
_MAX_HEADER_BYTES = 1 << 20
#: A recording has at most 1 GiB, and pages shrink to about a tenth.
_MAX_TOTAL_BYTES = 16 << 30
_MEMORY_BYTES = 1 << 30

Headers = list[tuple[str, str]]
_Key = tuple[str, str, str]


class Damaged(Exception):
    """A file is not a recording, or not a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedExchange:
    """One recorded exchange, without its content."""

    method: str
    url: str
    body_sha256: str
    """Digest of the request's body, hex."""
    cookies: frozenset[str]
    """Cookies of the request, each `name=value`."""
    status: int
    media_type: str
    size_bytes: int
    """Size of the response's body."""
    time_s: float
    """When it was recorded, in seconds since 1970."""
    offset: int
    """Where the response's record begins in the file."""


def cookies_of(header: str) -> frozenset[str]:
    """Return the cookies in a request's `Cookie` header, as `name=value`."""
    return frozenset(filter(None, (part.strip() for part in header.split(";"))))


class WebRecording:
    """The exchanges of one recording; the file itself stays on disk.

    Raises:
        Damaged: The file is not a whole recording.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.entries = tuple(_scan(file))
        self._by_key: dict[_Key, list[RecordedExchange]] = {}
        for entry in self.entries:
            self._by_key.setdefault((entry.method, entry.url, entry.body_sha256), []).append(entry)

    def find(self, method: str, url: str, body: bytes, cookies: frozenset[str]) -> RecordedExchange | None:
        """Return the exchange that answers a request, or None."""
        candidates = self._by_key.get((method, url, hashlib.sha256(body).hexdigest()), ())
        # Scripts make cookies of their own, which differ each time, so a missing one counts less than an equal one.
        return max(
            candidates, key=lambda entry: 2 * len(entry.cookies & cookies) - len(entry.cookies - cookies), default=None
        )

    def read(self, entry: RecordedExchange) -> tuple[str, Headers, bytes]:
        """Return the phrase of a response's status, its headers and its body."""
        self._file.seek(entry.offset)
        record = next(iter(ArchiveIterator(self._file)))
        phrase = record.http_headers.statusline.partition(" ")[2]
        return phrase, record.http_headers.headers, _content(record)


def records(
    method: str, url: str, request: tuple[Headers, bytes], response: tuple[int, str, Headers, bytes], *, is_first: bool
) -> bytes:
    """Return the bytes that append an exchange to a recording; the first also gets a record about the file.

    Headers for one hop and credentials of the `Authorization` header are left out.
    """
    buffer = io.BytesIO()
    writer = WARCWriter(buffer, gzip=True)
    if is_first:
        writer.write_record(writer.create_warcinfo_record(None, {"software": "envd", "format": "WARC File Format 1.0"}))
    headers, body = request
    status, phrase, response_headers, response_body = response
    target = "/" + url.partition("://")[2].partition("/")[2]
    sent = StatusAndHeaders(f"{method} {target} HTTP/1.1", _kept(headers), is_http_request=True)
    received = StatusAndHeaders(f"{status} {phrase}", _kept(response_headers), protocol="HTTP/1.1")
    writer.write_request_response_pair(
        writer.create_warc_record(url, "request", payload=io.BytesIO(body), http_headers=sent),
        writer.create_warc_record(url, "response", payload=io.BytesIO(response_body), http_headers=received),
    )
    return buffer.getvalue()


_LEFT_OUT = {
    "authorization", "connection", "keep-alive", "proxy-authorization", "proxy-connection", "transfer-encoding",
}  # fmt: skip


def _kept(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in _LEFT_OUT]


def _scan(file: IO[bytes]) -> Iterator[RecordedExchange]:
    """Read a whole file and yield its exchanges in the order of their responses. Raises: Damaged."""
    responses: dict[str, dict[str, Any]] = {}
    requests: dict[str, dict[str, Any]] = {}
    try:
        _require_whole(file)
        records = ArchiveIterator(file)
        for record in records:
            headers = record.rec_headers
            if record.rec_type not in {"request", "response"}:
                continue
            _require_short(headers.headers, record.http_headers.headers)
            body = _content(record)
            if record.rec_type == "request":
                requests[headers["WARC-Concurrent-To"]] = {
                    "method": record.http_headers.protocol,
                    "body_sha256": hashlib.sha256(body).hexdigest(),
                    "cookies": cookies_of(record.http_headers.get_header("Cookie", "")),
                }
            else:
                responses[headers["WARC-Record-ID"]] = {
                    "url": headers["WARC-Target-URI"],
                    "status": int(record.http_headers.get_statuscode()),
                    "media_type": record.http_headers.get_header("Content-Type", "").partition(";")[0],
                    "size_bytes": len(body),
                    "time_s": datetime.fromisoformat(headers["WARC-Date"].replace("Z", "+00:00")).timestamp(),
                    # This call skips the content that was not read.
                    "offset": records.get_record_offset(),
                }
    except (ArchiveLoadFailed, OSError, EOFError, zlib.error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"not a compressed WARC file, or damaged: {error}") from error
    if responses.keys() != requests.keys() or not responses:
        raise Damaged("it has a response without its request, or none at all")
    for identity, response in responses.items():
        yield RecordedExchange(**response, **requests[identity])


def _require_whole(file: IO[bytes]) -> None:
    """Unpack all of a file. Raises: OSError, EOFError, zlib.error: It is damaged; ValueError: It is too large."""
    # warcio accepts truncated records. Each is a member of the file, with its own length and checksum.
    file.seek(0)
    size = 0
    with gzip.GzipFile(fileobj=file) as whole:
        while part := whole.read(1 << 20):
            size += len(part)
            if size > _MAX_TOTAL_BYTES:
                raise ValueError(f"it has more than {_MAX_TOTAL_BYTES} bytes when it is unpacked")
    file.seek(0)


def _require_short(*several: Headers) -> None:
    if sum(map(len, chain.from_iterable(chain(*several)))) > _MAX_HEADER_BYTES:
        raise ValueError(f"headers have more than {_MAX_HEADER_BYTES} bytes")


def _content(record: Any) -> bytes:
    parts, size = [], 0
    # One read returns at most what is buffered.
    while part := record.raw_stream.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ValueError(f"a body has more than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def main(path: str) -> None:
    """Print the exchanges of a file as JSON, or why it is damaged."""
    # The file may come from elsewhere: a line of a header is unpacked whole.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with open(path, "rb") as file:
        try:
            found: Mapping[str, Any] = {"entries": [asdict(entry) for entry in WebRecording(file).entries]}
        except Damaged as error:
            found = {"error": str(error)}
        except MemoryError:
            found = {"error": f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory to read"}
    json.dump(found, sys.stdout, default=sorted)


if __name__ == "__main__":
    main(sys.argv[1])
