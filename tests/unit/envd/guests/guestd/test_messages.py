"""Parsing of multipart forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envd.guests.guestd.messages import HttpError, parse_multipart


def multipart(fields: dict[str, bytes], boundary: bytes) -> bytes:
    body = b""
    for name, value in fields.items():
        head = f'Content-Disposition: form-data; name="{name}"; filename="x"'.encode()
        body += b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + value + b"\r\n"
    return body + b"--" + boundary + b"--\r\n"


@given(st.binary(max_size=300))
def test_the_parts_of_a_form_are_found_byte_for_byte(data: bytes) -> None:
    body = multipart({"file_path": b"/tmp/x", "file_data": data}, b"b0undary-not-in-data")
    parts = parse_multipart(body, b"b0undary-not-in-data")
    assert {name: body[part.start : part.end] for name, part in parts.items()} == {
        "file_path": b"/tmp/x",
        "file_data": data,
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n",
        b"x--b\r\n\r\n",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nno end',
        b"--b\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--b--",
    ],
)
def test_a_malformed_form_is_an_error(body: bytes) -> None:
    with pytest.raises(HttpError) as raised:
        parse_multipart(body, b"b")
    assert raised.value.status == 400
