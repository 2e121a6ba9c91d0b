"""The `envd` command in its own process, with fake desktops: signals, ports and exit statuses."""

import json
import signal
import sqlite3
import stat
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from cuaenv.client import Done, Draining, EnvClient, MachineLost, Tls, TypeText, Unauthenticated, Wait
from cuaenv.v1 import env_pb2, env_pb2_grpc
from tests.support.command import CommandOutput, run_envd
from tests.support.served import ServedDaemon


def serve(state_dir: Path, *flags: str, listen: str = "127.0.0.1:0", config: str = "") -> ServedDaemon:
    """Start a daemon that drains for longer than these tests wait."""
    limits = "[limits]\ndrain_timeout_s = 600\n"
    return ServedDaemon(state_dir, limits + config, "--hypervisor", "fake", *flags, listen=listen)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def daemon(state_dir: Path) -> Iterator[ServedDaemon]:
    with serve(state_dir, "--pool", "2") as envd:
        yield envd


def test_an_episode_on_a_served_pool_appears_in_the_metrics(daemon: ServedDaemon) -> None:
    metrics_url = daemon.wait_for(r"metrics on (http://\S+)")
    address = daemon.wait_for(r"listening on (\S+)")
    daemon.wait_for(r"pool desktop: (ready, 2 machines)")
    with EnvClient(address) as client, client.reset("fake/save-note") as episode:
        episode.step(TypeText("not the requested text"))
        episode.step(Done())
        assert episode.evaluate().score == 0.0
        with urllib.request.urlopen(metrics_url) as response:  # noqa: S310 - it came from our own process
            series = response.read().decode()
    assert 'envd_leases{pool="desktop"} 1.0' in series
    assert 'envd_step_duration_seconds_count{phase="total",pool="desktop"} 2.0' in series
    assert 'envd_episodes_ended_total{pool="desktop",run="other",state="terminated"} 1.0' in series
    assert 'envd_rpc_duration_seconds_count{code="OK",method="Evaluate"} 1.0' in series
    # EnvdLeak fires for an increase, also of the first one.
    assert 'envd_leftovers_total{kind="process"} 0.0' in series
    assert daemon.end() == 0
    assert daemon.lines[-1] == "stopped; nothing is left running\n"


def command(*args: str) -> dict[str, Any]:
    """Run an `envd` command and return its JSON output."""
    done = run_envd(*args, "--json")
    assert done.status == 0, done.err
    output: dict[str, Any] = json.loads(done.out)
    return output


def test_a_daemon_that_other_hosts_can_reach_serves_clients_with_a_token_over_tls(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = command("certs", str(tmp_path / "certs"))
    token = command("tokens", "new", "trainer-a", "--scope", "run")
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(token["line"] + "\n")
    settings = {**certs["settings"], "security.tokens_file": str(tokens)}
    del settings["security.client_ca"]
    security = "".join(f'{key.removeprefix("security.")} = "{path}"\n' for key, path in settings.items())
    with serve(state_dir, "--pool", "1", listen="0.0.0.0:0", config=f"[security]\n{security}") as envd:
        port = envd.wait_for(r"listening on 0\.0\.0\.0:(\d+)")
        tls = Tls(ca=Path(certs["files"]["ca"]))
        monkeypatch.delenv("ENVD_TOKEN", raising=False)
        with EnvClient(f"127.0.0.1:{port}", tls=tls) as stranger, pytest.raises(Unauthenticated):
            stranger.list_pools()
        monkeypatch.setenv("ENVD_TOKEN", token["token"])
        with EnvClient(f"127.0.0.1:{port}", tls=tls) as client, client.reset("fake/save-note") as episode:
            episode.step(Done())
            assert episode.evaluate().score == 0.0
        envd.end()
    out, err = envd.output, envd.log_file.read_text()
    assert "nothing is left running" in out
    assert "opened by trainer-a" in err
    assert token["token"] not in out + err


def test_a_daemon_reachable_from_other_hosts_without_tls_does_not_start(state_dir: Path) -> None:
    where = ("--hypervisor", "fake", "--state-dir", str(state_dir), "--listen", "0.0.0.0:0")
    done = run_envd("serve", "--pool", "1", *where)
    assert done.status == 2
    assert "reached from other hosts" in done.err
    assert "set security.tls_cert and security.tls_key" in done.err
    assert not state_dir.exists()


def test_a_drain_waits_for_open_episodes_and_rejects_new_ones(daemon: ServedDaemon) -> None:
    address = daemon.wait_for(r"listening on (\S+)")
    with EnvClient(address) as client:
        with client.reset("fake/save-note") as episode:
            daemon.send(signal.SIGTERM)
            daemon.wait_for(r"draining: (1 live episodes)")
            with pytest.raises(Draining), client.reset("fake/save-note", timeout=timedelta(seconds=4)):
                pass
            episode.step(Done())
            assert episode.evaluate().score == 0.0
        assert daemon.wait() == 0
    assert "nothing is left running" in daemon.output


def test_a_second_signal_does_not_wait_for_open_episodes(daemon: ServedDaemon) -> None:
    # Without it the daemon waits for `limits.drain_timeout_s`, which is longer than the timeout of `Program.wait`.
    # Not with the client, which keeps trying to close an episode whose daemon has ended.
    with grpc.insecure_channel(daemon.wait_for(r"listening on (\S+)")) as channel:
        stub: Any = env_pb2_grpc.CUAEnvStub(channel)
        stub.Reset(env_pb2.ResetRequest(request_id="1", task_id="fake/save-note"), timeout=60)
        daemon.send(signal.SIGINT)
        daemon.wait_for(r"(draining): 1 live")
        daemon.send(signal.SIGINT)
        assert daemon.wait() == 0
    assert "nothing is left running" in daemon.output


def test_a_second_daemon_on_the_same_state_directory_is_rejected(daemon: ServedDaemon, state_dir: Path) -> None:
    daemon.wait_for(r"listening on (\S+)")
    second = run_envd("serve", "--hypervisor", "fake", "--pool", "1", "--state-dir", str(state_dir))
    assert second.status == 2
    assert f"is in use by envd, process {daemon.process.pid}" in " ".join(second.err.split())
    assert "Traceback" not in second.err


def started_steps(state_dir: Path) -> list[str]:
    """Return the request ids of steps that a crash would interrupt now."""
    connection = sqlite3.connect(state_dir / "envd.db")
    try:
        return [i for (i,) in connection.execute("SELECT request_id FROM answers WHERE kind = 'step' AND answer = ''")]
    finally:
        connection.close()


def test_after_a_daemon_was_killed_clients_get_machine_lost_and_recorded_scores(tmp_path: Path) -> None:
    state_dir, listen = tmp_path / "state", f"unix:{tmp_path}/envd.sock"
    first = serve(state_dir, "--pool", "2", listen=listen)
    first.wait_for(r"(listening)")
    stepping: list[BaseException] = []
    with EnvClient(listen) as client, client.reset("fake/save-note") as scored, client.reset("fake/save-note") as other:
        scored.step(Done())
        assert scored.evaluate().score == 0.0

        def step() -> None:
            try:
                other.step(Wait(timedelta(seconds=60)))
            except MachineLost as error:
                stepping.append(error)

        caller = threading.Thread(target=step, daemon=True)  # it outlives a test that fails
        caller.start()
        deadline_s = time.monotonic() + 60
        while not started_steps(state_dir):
            assert time.monotonic() < deadline_s, "the step did not start within a minute"
            time.sleep(0.05)
        first.end(signal.SIGKILL)
        with serve(state_dir, "--pool", "2", listen=listen) as successor:
            assert successor.wait_for(r"(.*) of an earlier daemon: 0 continue, 2 ended or were lost") == "2 episodes"
            successor.wait_for(r"(listening)")
            caller.join(timeout=120)
            assert ["daemon restarted during step" in str(error) for error in stepping] == [True]
            assert scored.evaluate().score == 0.0
            with pytest.raises(MachineLost, match="restarted"):
                other.evaluate()
            with client.reset("fake/save-note") as fresh:
                fresh.step(Done())
            scored.close()
            other.close()
            assert successor.end() == 0
    assert "nothing is left running" in successor.output
    assert stat.S_IMODE((state_dir / "envd.db").stat().st_mode) == 0o600


def test_usage_errors_are_one_line_with_exit_status_2(tmp_path: Path) -> None:
    state = ["--hypervisor", "fake", "--state-dir", str(tmp_path)]
    without_pool = run_envd("serve", "--state-dir", str(tmp_path))
    assert without_pool.status == 2
    assert without_pool.err.startswith("error: no pool is configured; pass --pool 2")
    for_all = run_envd("serve", *state, "--pool", "1", "--listen", "0.0.0.0:1")
    assert for_all.status == 2
    assert "only loopback is served" in for_all.err
    config = tmp_path / "envd.toml"
    config.write_text("[pools.desktop]\nsise = 1\n", encoding="utf-8")
    message = f"error: {config}: pools.desktop.sise: unknown key; did you mean size?\n"
    assert run_envd("serve", *state, "--config", str(config)) == CommandOutput(status=2, out="", err=message)


def test_a_demo_on_fake_desktops_prints_one_json_object_and_writes_its_files(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    flags = ["--hypervisor", "fake", "--state-dir", str(tmp_path / "state"), "--out", str(out)]
    report = command("demo", *flags)
    assert report == json.loads((out / "episode.json").read_text(encoding="utf-8"))
    assert [(episode["policy"], episode["reward"]) for episode in report["episodes"]] == [
        ("oracle", 1.0),
        ("null", 0.0),
        ("stops", 0.0),
        ("solves", 1.0),
        ("stops-branch-solves", 1.0),
        ("solves-branch-strays", 0.0),
    ]
    members, branches = report["episodes"][:4], report["episodes"][4:]
    assert len({member["steps"][0]["frame_id"] for member in members}) == 1
    assert len({member["template_digest"] for member in members}) == 1
    assert [branch["parent_episode_id"] for branch in branches] == [member["episode_id"] for member in members[2:]]
    for episode in report["episodes"]:
        for step in episode["steps"]:
            with Image.open(out / step["frame"]) as frame:
                assert frame.size == (1280, 800)
    assert (out / "oracle.gif").stat().st_size > 0
    with Image.open(out / "group.png") as picture:
        assert picture.width > 1000
