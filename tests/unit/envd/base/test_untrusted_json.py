"""JSON and base64 of a guest: what is parsed, what is rejected, and that the event loop gets its turn."""

import asyncio
import base64
import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envd.base.untrusted_json import MAX_ESCAPES, MAX_STRUCTURE_BYTES, check_structure, decode_base64, parse

#: Larger than what is parsed unmeasured.
PADDING = "x" * MAX_STRUCTURE_BYTES


@asynccontextmanager
async def counted_turns() -> AsyncIterator[list[int]]:
    """Count the turns of the event loop that another task gets."""
    turns = [0]

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    counting = asyncio.create_task(count())
    yield turns
    counting.cancel()


@pytest.mark.parametrize("text", ["[]" * 10, '"a\\', "[1e999999]"])
async def test_small_documents_are_parsed_unmeasured(text: str) -> None:
    await check_structure(text.encode())


async def test_a_long_string_is_parsed_while_the_loop_runs_unless_it_has_many_escapes() -> None:
    text = 'é"\\,[{' * (MAX_ESCAPES // 4)
    async with counted_turns() as turns:
        assert await parse(json.dumps({"return": text}).encode()) == {"return": text}
    assert turns[0] > 50
    with pytest.raises(ValueError, match="escaped characters"):
        await parse(b'"' + b"\\n" * (MAX_ESCAPES + 1) + b'"')


@pytest.mark.parametrize(
    "document",
    [
        b"[" + b"[]," * MAX_STRUCTURE_BYTES + b"[]]",
        b'{"a": "' + b"x" * MAX_STRUCTURE_BYTES + b'", "b": ' + b" " * MAX_STRUCTURE_BYTES + b"1}",
        b'["\\\\", ' + b"0," * MAX_STRUCTURE_BYTES + b"0]",
    ],
)
async def test_a_document_with_much_outside_of_strings_is_rejected(document: bytes) -> None:
    with pytest.raises(ValueError, match="outside of strings"):
        await parse(document)


pieces = st.sampled_from(["\\", '"', "[", "é", "\\\\", '\\"', "a"])


@settings(max_examples=100, derandomize=True)
@given(st.lists(pieces, max_size=40).map("".join), st.integers(min_value=1, max_value=7))
def test_strings_are_recognised_wherever_the_pieces_end(text: str, piece_bytes: int) -> None:
    """A document whose structure has exactly the size of the limit is accepted, and one byte more is not."""
    document = json.dumps([text, PADDING], ensure_ascii=False)
    check = functools.partial(check_structure, max_structure_bytes=len("[, ]"), piece_bytes=piece_bytes)
    short = document.replace(PADDING, "").encode()
    asyncio.run(check(short))
    with pytest.raises(ValueError, match="outside of strings"):
        asyncio.run(check(short + b" "))


@pytest.mark.parametrize("size", [0, 1, 3 << 18, (3 << 20) + 1])
async def test_base64_is_decoded_at_any_length(size: int) -> None:
    data = bytes(size)
    assert await decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("text", ["é", "A" * (1 << 20) + "AAA", "A" * (1 << 20) + "!AAA"])
async def test_text_that_is_not_base64_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - `binascii.Error` has no stable text
        await decode_base64(text)
