"""`envd compat` as a process, and as a process of `envd serve --compat`, on drawn desktops."""

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import EnvClient, Tls
from envd.api.security.tokens import new_token
from envd.base.config import Config
from envd.cli.certs import make_development_certs, write_certs
from envd.daemon.compat import serve_compat
from tests.support.command import run_envd
from tests.support.served import EnvdProgram, ServedDaemon

TASK = {"task_config": {"id": "fake/count-to-five"}}
COUNT = "pyautogui.click(819, 100, clicks=3); pyautogui.doubleClick()"
CONFIG = """\
[hypervisor]
uri = "fake"

[pools.fake]
size = 1
capacity = 1
"""


def post(
    url: str, body: object, *, token: str = "", context: ssl.SSLContext | None = None
) -> tuple[int, dict[str, Any]]:
    """Send JSON; return the status and the JSON of the response."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 -- our own server
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def compat(*arguments: str | Path) -> EnvdProgram:
    """Start `envd compat`."""
    return EnvdProgram("compat", *arguments)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a daemon for the tests that neither end nor configure one."""
    with ServedDaemon(tmp_path_factory.mktemp("daemon") / "s", CONFIG) as daemon:
        yield daemon.wait_for(r"listening on (\S+)")


def episode_count(address: str) -> int:
    with EnvClient(address, token="") as client:
        return len(client.list_episodes())


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, "did not happen within a minute"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int, protocol: bytes = b"") -> list[int]:
    """Return the processes of `envd compat` that a process has started, of one protocol if it is given."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        if b"\0compat\0" + protocol in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(int(child))
    return found


def test_a_process_plays_an_episode_and_closes_the_open_ones_at_its_end(target: str) -> None:
    with compat("slime-osworld=127.0.0.1:0", "--envd", target) as server:
        url = server.wait_for(r"^protocol slime-osworld on (http://127.0.0.1:\d+)$")
        status, opened = post(f"{url}/reset", TASK)
        assert status == 200, opened
        assert base64.b64decode(opened["screenshot_base64"]).startswith(b"\x89PNG")
        episode = {"episode_id": opened["episode_id"]}
        assert post(f"{url}/step", {**episode, "action": COUNT, "pause": 0})[1]["step"] == 1
        assert post(f"{url}/evaluate", episode) == (200, {"reward": 1.0})
        assert episode_count(target) == 1
        assert server.end() == 0
    assert episode_count(target) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["areal=127.0.0.1:0", "--envd", "127.0.0.1:1"], "127.0.0.1:1"),
        (["gopher"], "'gopher' is not a protocol; use slime-osworld"),
        (["areal=0.0.0.0:0", "--serve-cert", "cert.pem"], "--serve-cert, --serve-key"),
        (["areal", "--envd", "127.0.0.1:1", "--tls-cert", "cert.pem"], "add --tls-ca FILE"),
    ],
)
def test_a_process_that_cannot_serve_says_why(arguments: list[str], message: str) -> None:
    done = run_envd("compat", *arguments)
    assert done.status != 0
    assert message in " ".join(done.err.split())


def test_a_process_listens_beyond_loopback_only_with_tls_and_proof_of_identity(target: str) -> None:
    done = run_envd("compat", "areal=0.0.0.0:0", "--envd", target)
    assert done.status == 2
    assert "can be reached from other hosts" in " ".join(done.err.split())


def test_a_daemon_starts_a_protocol_again_that_ended_and_ends_it_with_itself(tmp_path: Path) -> None:
    config = 'compat = ["slime-osworld=127.0.0.1:0", "areal=127.0.0.1:0"]\n' + CONFIG
    with ServedDaemon(tmp_path / "s", config) as daemon:
        url = daemon.wait_for(r"^protocol slime-osworld on (\S+)$")
        assert daemon.wait_for(r"^protocol areal on (\S+)$") != url
        target = daemon.wait_for(r"listening on (\S+)")
        episode_id = post(f"{url}/reset", TASK)[1]["episode_id"]
        first = children_of(daemon.process.pid)
        assert len(first) == 2
        (killed,) = children_of(daemon.process.pid, b"slime-osworld")
        os.kill(killed, signal.SIGKILL)

        def answers() -> bool:
            try:
                return post(f"{url}/close", {"episode_id": "none"})[0] == 200
            except OSError:
                return False

        until(answers)
        assert "compat slime-osworld: its process ended (status -9)" in daemon.log_file.read_text(encoding="utf-8")
        # Its episode is lost to its client; the daemon ends it with its lease.
        assert post(f"{url}/evaluate", {"episode_id": episode_id})[0] == 404
        assert episode_count(target) == 1
        until(lambda: len(children_of(daemon.process.pid)) == 2)
        second = children_of(daemon.process.pid)
        assert set(first) - set(second) == {killed}, "the other one is left alone"
        daemon.send(signal.SIGTERM)
        daemon.wait_for(r"(draining)")  # two signals that are pending together are delivered as one
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
        assert not any(map(is_alive, [*first, *second]))


async def test_a_protocol_whose_process_is_stopped_is_noticed_and_started_again(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("envd.daemon.compat._PROBE_INTERVAL_S", 0.2)
    monkeypatch.setattr("envd.daemon.compat._PROBE_TIMEOUT_S", 2.0)
    config = Config(state_dir=tmp_path / "c", compat=("areal=127.0.0.1:0",))
    async with serve_compat(config, target) as addresses:
        (first,) = children_of(os.getpid())
        url = f"http://{addresses['areal']}"
        await asyncio.sleep(1)
        assert children_of(os.getpid()) == [first], "a process that answers is left alone"
        os.kill(first, signal.SIGSTOP)
        await asyncio.to_thread(until, lambda: "did not answer for 2 s, 2 times, and was killed" in caplog.text)
        await asyncio.to_thread(until, lambda: children_of(os.getpid()) not in ([], [first]))
        assert not is_alive(first)

        def answers() -> bool:
            try:
                return post(f"{url}/envs", {})[0] == 200
            except OSError:
                return False

        await asyncio.to_thread(until, answers)


def test_a_protocol_does_not_outlive_a_killed_daemon_and_the_next_one_serves_it(tmp_path: Path) -> None:
    config = 'compat = ["areal=127.0.0.1:0"]\n' + CONFIG
    with ServedDaemon(tmp_path / "s", config) as daemon:
        daemon.wait_for(r"^protocol areal on (\S+)$")
        (child,) = children_of(daemon.process.pid)
        assert daemon.end(signal.SIGKILL) == -signal.SIGKILL
        until(lambda: not is_alive(child))
    with ServedDaemon(tmp_path / "s", config) as daemon:
        url = daemon.wait_for(r"^protocol areal on (\S+)$")
        assert post(f"{url}/envs", {})[0] == 200


def test_a_daemon_whose_protocols_address_is_taken_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config = f'compat = ["slime-osworld=127.0.0.1:0", "areal={taken}"]\n' + CONFIG
        with ServedDaemon(tmp_path / "t", config) as daemon:
            assert daemon.wait() == 2
            log = " ".join(daemon.log_file.read_text(encoding="utf-8").split())
            assert f"compat areal {taken}: cannot be bound" in log
            assert f"compat areal={taken}: its process did not start (status 2)" in log


def test_a_protocol_of_a_daemon_uses_its_certificate_its_client_authority_and_its_tokens(tmp_path: Path) -> None:
    certs = write_certs(tmp_path / "certs", make_development_certs([], now=datetime.now(UTC)))
    token = new_token("alice", "run")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{token.line}\n", encoding="utf-8")
    tokens.chmod(0o600)
    security = (
        f'\n[security]\ntls_cert = "{certs["server"]}"\ntls_key = "{certs["server_key"]}"\n'
        f'client_ca = "{certs["ca"]}"\ntokens_file = "{tokens}"\n'
    )
    with ServedDaemon(tmp_path / "s", 'compat = ["areal=127.0.0.1:0"]\n' + CONFIG + security) as daemon:
        url = daemon.wait_for(r"^protocol areal on (https://\S+)$")
        context = ssl.create_default_context(cafile=str(certs["ca"]))
        with pytest.raises((urllib.error.URLError, OSError)):
            post(f"{url}/envs", {}, token=token.secret, context=context)
        context.load_cert_chain(certs["client"], certs["client_key"])
        assert post(f"{url}/envs", {}, context=context)[0] == 401
        status, content = post(f"{url}/envs", {}, token=token.secret, context=context)
        assert (status, list(content)) == (200, ["session_id"])

        # The same as a process of its own, over the daemon's TLS.
        target = daemon.wait_for(r"listening on (\S+)")
        tls = Tls(ca=certs["ca"], cert=certs["client"], key=certs["client_key"])
        with EnvClient(target, token=token.secret, tls=tls) as client:
            assert client.list_episodes() == []
        options = ("--tls-ca", certs["ca"], "--tls-cert", certs["client"], "--tls-key", certs["client_key"])
        with compat("areal=127.0.0.1:0", "--envd", target, *options) as server:
            plain = server.wait_for(r"^protocol areal on (http://\S+)$")
            assert post(f"{plain}/envs", {}, token=token.secret[:-1] + "-")[0] == 401
            assert post(f"{plain}/envs", {}, token=token.secret)[0] == 200
