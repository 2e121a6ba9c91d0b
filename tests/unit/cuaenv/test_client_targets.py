"""Targets: parsing, and names with several addresses."""

import asyncio
import socket
import subprocess
import sys
from typing import Any

import pytest

from cuaenv.client import AsyncEnvClient, Unavailable
from cuaenv.client.targets import Address, parse_targets, resolve


@pytest.mark.parametrize(
    ("targets", "parsed"),
    [
        ("127.0.0.1:50051", ("127.0.0.1:50051",)),
        ("a:1,b:2", ("a:1", "b:2")),
        (" a:1 , b:2 ", ("a:1", "b:2")),
        (["a:1", "b:2,c:3"], ("a:1", "b:2", "c:3")),
        (["a:1", "a:1"], ("a:1",)),
        ("unix:/run/envd.sock", ("unix:/run/envd.sock",)),
        ("dns:///pool.example.org:50051", ("dns:///pool.example.org:50051",)),
        (("[::1]:50051",), ("[::1]:50051",)),
        ("ray://auto", ("ray://auto",)),
        ("ray://head.example.org:6379", ("ray://head.example.org:6379",)),
    ],
)
def test_targets_are_text_or_a_sequence(targets: str | list[str], parsed: tuple[str, ...]) -> None:
    assert parse_targets(targets) == parsed


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        ("", "name no host"),
        ([], "name no host"),
        ("a:1,", "have an empty part"),
        ("a:1 b:2", "has white space; separate hosts by commas"),
        ("dns:///pool.example.org", "no port in 'dns:///pool.example.org'; give HOST:PORT"),
        ("dns:///:50051", "no host in"),
        ("gpu-host-1", "no port in 'gpu-host-1'"),
        ("[::1]", "no port in"),
        ("http://127.0.0.1:50051", "'http://127.0.0.1:50051' is a URL; give HOST:PORT"),
        ("https://pool.example.org/", "is a URL; give HOST:PORT"),
        ("50051", "no host in"),
        ("ray://auto,a:1", "give ray://auto or ray://HOST:PORT of the Ray head, and no other target"),
        ("ray://head", "give ray://auto or ray://HOST:PORT"),
    ],
)
def test_malformed_targets_are_rejected(targets: str | list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_targets(targets)


@pytest.mark.parametrize(
    ("ips", "targets"),
    [
        (["192.0.2.7", "192.0.2.5", "192.0.2.7"], ["192.0.2.5:1", "192.0.2.7:1"]),
        (["2001:db8::1", "192.0.2.7"], ["192.0.2.7:1"]),
        (["2001:db8::1"], ["[2001:db8::1]:1"]),
    ],
    ids=["each once", "both families", "IPv6"],
)
async def test_a_name_resolves_to_its_addresses(
    monkeypatch: pytest.MonkeyPatch, ips: list[str], targets: list[str]
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ips]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    addresses = [Address(target, "pool.example.org:1") for target in targets]
    assert await resolve("dns:///pool.example.org:1") == tuple(addresses)


async def test_other_targets_are_left_to_grpc() -> None:
    assert await resolve("pool.example.org:50051") == (Address("pool.example.org:50051"),)


def test_clients_of_listed_hosts_import_nothing_of_ray() -> None:
    script = (
        "import asyncio, sys\n"
        "from cuaenv.client import AsyncEnvClient\n"
        "async def main():\n"
        "    async with AsyncEnvClient('127.0.0.1:1,127.0.0.1:2') as client:\n"
        "        client.statistics()\n"
        "asyncio.run(main())\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'ray' or m.startswith('cuaenv.client.ray_')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_without_ray_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    async with AsyncEnvClient("ray://auto") as client:
        with pytest.raises(Unavailable, match=r"Ray is not installed; install `envd-trainer\[ray\]`"):
            await client.list_pools()
