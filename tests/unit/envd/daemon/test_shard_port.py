"""The port that all shards of a daemon listen on."""

import socket

import pytest

from envd.api.server import ListenAddress, parse_listen
from envd.base.errors import ConfigError
from envd.daemon.shards.port import reserved_port


def listening(address: str) -> socket.socket:
    """A socket as that of a shard."""
    host, _, port = address.rpartition(":")
    shard = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as gRPC
        shard.setsockopt(socket.SOL_SOCKET, option, 1)
    shard.bind((host, int(port)))
    shard.listen()
    return shard


def test_several_sockets_listen_on_a_reserved_port_and_get_all_connections() -> None:
    with (
        reserved_port(parse_listen("127.0.0.1:0")) as address,
        listening(address) as first,
        listening(address) as second,
    ):
        host, _, port = address.rpartition(":")
        first.setblocking(False)
        second.setblocking(False)
        clients = [socket.create_connection((host, int(port))) for _ in range(16)]
        accepted = []
        for shard in (first, second):
            try:
                while True:
                    accepted.append(shard.accept()[0])
            except BlockingIOError:
                pass
        assert {each.getpeername() for each in accepted} == {each.getsockname() for each in clients}
        for each in (*clients, *accepted):
            each.close()


def test_a_port_that_another_daemon_listens_on_is_refused_even_if_its_shards_share_it() -> None:
    with (
        reserved_port(parse_listen("127.0.0.1:0")) as address,
        listening(address),
        pytest.raises(ConfigError, match=rf"listen {address}: cannot be bound: .*in use"),
        reserved_port(parse_listen(address)),
    ):
        raise AssertionError("it was reserved")


def test_an_address_of_another_host_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"listen 192\.0\.2\.1:0: cannot be bound"),
        reserved_port(ListenAddress(host="192.0.2.1", port=0)),
    ):
        raise AssertionError("it was reserved")


def test_a_port_may_be_reserved_again_at_once() -> None:
    with reserved_port(parse_listen("127.0.0.1:0")) as address, listening(address) as shard:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            # Closed here first: the kernel remembers the connection for a minute.
            shard.accept()[0].close()
            assert client.recv(1) == b""
    with reserved_port(parse_listen(address)) as again:
        assert again == address
