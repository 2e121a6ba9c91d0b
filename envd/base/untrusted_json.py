"""JSON and base64 of a guest, parsed without stalling the event loop.

A JSON parser holds the GIL until it has finished. Its time and memory depend on the number of values and of escapes in
strings more than on the size: 64 MiB of `[]` takes 5 s and 1.6 GiB, one plain string of that size 40 ms. So what is
outside of strings is measured first, in pieces, and bounded.
"""

import asyncio
import base64

from pydantic import JsonValue
from pydantic_core import from_json

#: Most bytes outside of strings. Smaller documents are parsed unmeasured: at most 30 ms, if they are all `[]`.
MAX_STRUCTURE_BYTES = 256 << 10
#: Most escaped characters in strings: about 10 ns each.
MAX_ESCAPES = 1 << 20
#: Measured or decoded between two turns of the event loop: about 1 ms.
_PIECE_BYTES = 64 << 10
#: A multiple of 4 characters; about 3 ms.
_BASE64_PIECE_CHARS = 1 << 20


async def parse(document: bytes) -> JsonValue:
    """Parse a document of any size. Raises: ValueError: it is not JSON, or exceeds the limits of `check_structure`."""
    await check_structure(document)
    value: JsonValue = from_json(document)
    return value


async def check_structure(
    document: bytes, *, max_structure_bytes: int = MAX_STRUCTURE_BYTES, piece_bytes: int = _PIECE_BYTES
) -> None:
    """Check that a document can be parsed quickly. Raises: ValueError: too much structure or too many escapes."""
    if len(document) <= max_structure_bytes:
        return
    structure_bytes = escape_count = 0
    is_in_string = is_escaped = False
    for start in range(0, len(document), piece_bytes):
        piece = document[start : start + piece_bytes]
        if is_escaped:
            piece = b"_" + piece[1:]
        # Escape sequences first, so that each quote that is left begins or ends a string.
        piece = piece.replace(b"\\\\", b"__")
        is_escaped = piece.endswith(b"\\")
        escape_count += document.count(b"\\", start, start + len(piece))
        parts = piece.replace(b'\\"', b"__").split(b'"')
        structure_bytes += sum(map(len, parts[is_in_string::2]))
        is_in_string ^= len(parts) % 2 == 0
        if structure_bytes > max_structure_bytes:
            raise ValueError(f"more than {max_structure_bytes} bytes of JSON outside of strings")
        if escape_count > MAX_ESCAPES:
            raise ValueError(f"more than {MAX_ESCAPES} escaped characters in JSON")
        await asyncio.sleep(0)


async def decode_base64(text: str) -> bytes:
    """Decode a text of any length. Raises: ValueError: it is not base64."""
    if len(text) <= _BASE64_PIECE_CHARS:
        return base64.b64decode(text, validate=True)
    pieces: list[bytes] = []
    for start in range(0, len(text), _BASE64_PIECE_CHARS):
        pieces.append(base64.b64decode(text[start : start + _BASE64_PIECE_CHARS], validate=True))
        await asyncio.sleep(0)
    return b"".join(pieces)
