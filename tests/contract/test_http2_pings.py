"""How often a client may ping the server: keepalive pings are answered, floods of them end the connection."""

import asyncio

from envd.api.server import ApiServer

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _GOAWAY = 4, 6, 7
_ACK = 1
#: gRPC ends a connection after its third early ping; the first ping is never early, and the last shows the end.
_PING_COUNT = 5


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame of the connection itself."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload


async def answered_pings(server: ApiServer, *, interval_s: float) -> int:
    """Send pings; return how many were answered before the server ended the connection."""
    reader, writer = await asyncio.open_connection(*server.address.split(":"))
    try:
        writer.write(_PREFACE + frame(_SETTINGS))
        for count in range(_PING_COUNT):
            writer.write(frame(_PING, bytes(8)))
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == _GOAWAY:
                    return count
                if (head[3], head[4]) == (_PING, _ACK):
                    break
            await asyncio.sleep(interval_s)
        return _PING_COUNT
    finally:
        writer.close()


async def test_pings_a_second_apart_are_answered(server: ApiServer) -> None:
    assert await answered_pings(server, interval_s=1.1) == _PING_COUNT


async def test_a_flood_of_pings_ends_the_connection(server: ApiServer) -> None:
    assert await answered_pings(server, interval_s=0.0) < _PING_COUNT
