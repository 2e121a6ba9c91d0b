"""`envd serve --shards 2` in its own processes, with drawn desktops: a shard or all of them are killed."""

import os
import re
import signal
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cuaenv.v1 import env_pb2, env_pb2_grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from envd.api.relay.merge import shard_of
from envd.daemon.state_lock import holder
from tests.support.command import run_envd
from tests.support.served import ServedDaemon

CONFIG = """
shards = 2
[hypervisor]
uri = "fake"
[pools.desktop]
size = 4
allow_guest_access = true
"""
PIXELS = env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_RAW_ZSTD)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def daemon(state_dir: Path) -> Iterator[ServedDaemon]:
    served = ServedDaemon(state_dir, CONFIG)
    yield served
    if served.process.poll() is None:
        served.end(signal.SIGKILL)


def stub_of(address: str) -> Any:
    # A channel that waits long between two attempts to connect would hide a daemon that is back.
    options = (("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50))
    return env_pb2_grpc.CUAEnvStub(grpc.insecure_channel(address, options=options))


def reset(stub: Any, *, size: int = 1, request_id: str = "") -> list[str]:
    """Open a group, and return the ids of its episodes."""
    request = env_pb2.ResetRequest(
        request_id=request_id or str(uuid.uuid4()),
        task_id="fake/count-to-five",
        group_size=size,
        observation=PIXELS,
    )
    return [each.episode_id for each in stub.Reset(request, timeout=60, wait_for_ready=True).episodes]


def step(stub: Any, episode_id: str, index: int) -> env_pb2.StepResponse:
    """Click once, and retry as a client does while the daemon is unavailable."""
    request = env_pb2.StepRequest(
        request_id=f"step-{index}",
        episode_id=episode_id,
        step_index=index,
        actions=[env_pb2.Action(click=env_pb2.Click(at=env_pb2.Point(x=819, y=100)))],
        observation=PIXELS,
    )
    deadline_s = time.monotonic() + 120
    while True:
        try:
            response: env_pb2.StepResponse = stub.Step(request, timeout=60)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return response


def reason_of(error: grpc.RpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.reason)


def pid_of(state_dir: Path, shard: int) -> int:
    pid = holder(state_dir / f"shard-{shard}")
    assert pid is not None
    return pid


def scraped(url: str) -> str:
    with urllib.request.urlopen(url) as response:  # noqa: S310 -- it came from our own process
        text: str = response.read().decode()
    return text


def test_a_shard_that_is_killed_is_restarted_and_the_other_shard_continues(
    daemon: ServedDaemon, state_dir: Path
) -> None:
    metrics_url = daemon.wait_for(r"metrics on (http://\S+)")
    stub = stub_of(daemon.wait_for(r"listening on (\S+)"))
    lost, kept = reset(stub, size=2), reset(stub, size=2)
    assert [shard_of(each) for each in lost] == [shard_of(lost[0])] * 2
    assert {shard_of(each) for each in (*lost, *kept)} == {0, 1}
    victim = shard_of(lost[0])
    assert victim is not None
    first = step(stub, lost[0], 0)
    assert first.observation.frame.WhichOneof("content") is not None
    step(stub, kept[0], 0)

    os.kill(pid_of(state_dir, victim), signal.SIGKILL)
    # The other shard's episode is stepped, and the killed one's comes back with its recorded response.
    assert step(stub, kept[0], 1).episode.step_count == 2
    again = step(stub, lost[0], 0)
    assert again.replayed
    assert again.observation.frame.WhichOneof("content") is None
    assert again.observation.frame.frame_id == first.observation.frame.frame_id
    for episode_id, index in ((lost[0], 1), (lost[1], 0)):
        with pytest.raises(grpc.RpcError) as caught:
            step(stub, episode_id, index)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert reason_of(caught.value) == "MACHINE_LOST"
    assert step(stub, kept[0], 2).episode.step_count == 3
    for episode_id in lost:
        stub.Close(env_pb2.CloseRequest(episode_id=episode_id))
    assert {shard_of(each) for each in reset(stub, size=2)} == {victim}

    series = scraped(metrics_url)
    assert 'envd_shard_up{shard="0"} 1.0' in series
    assert 'envd_shard_up{shard="1"} 1.0' in series
    assert f'envd_step_duration_seconds_count{{phase="total",pool="desktop",shard="{1 - victim}"}} 3.0' in series
    assert re.search(r'envd_rpc_duration_seconds_count{code="OK",method="Step",shard="[01]"} [1-9]', series)
    assert 'method="Step",shard="supervisor"' not in series
    assert daemon.wait_for(rf"shard {victim}: (ended unexpectedly); restarting it")

    for episode_id in kept:
        stub.Close(env_pb2.CloseRequest(episode_id=episode_id))
    # Live episodes do not keep a daemon that is signalled twice.
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for(rf"shard {victim}: (draining): 2 live episodes")
    assert daemon.end() == 0
    assert daemon.lines[-1] == "stopped; nothing is left running\n"
    assert [holder(state_dir / f"shard-{index}") for index in range(2)] == [None, None]
    assert not (state_dir / "shards").exists()


@pytest.mark.long
def test_after_a_killed_supervisor_only_the_same_number_of_shards_recovers_the_state(
    daemon: ServedDaemon, state_dir: Path
) -> None:
    address = daemon.wait_for(r"listening on (\S+)")
    stub = stub_of(address)
    ids = [reset(stub, request_id=f"r{number}") for number in range(4)]
    assert {shard_of(each) for (each,) in ids} == {0, 1}
    first = step(stub, ids[0][0], 0)
    daemon.end(signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while any(holder(state_dir / f"shard-{index}") for index in range(2)):
        assert time.monotonic() < deadline_s, "the shards outlive their supervisor"
        time.sleep(0.05)

    other = run_envd("serve", "--hypervisor", "fake", "--pool", "4", "--state-dir", str(state_dir))
    assert other.status == 2
    assert "its last daemon had --shards 2 and did not end cleanly; start and stop it once with --shards 2" in other.err

    again = ServedDaemon(state_dir, CONFIG, listen=address)
    try:
        again.wait_for(r"listening on (\S+)")
        # The machines died with their shards, so each reset opens new episodes: on the shard that knows its request.
        for number, (episode_id,) in enumerate(ids):
            (new_id,) = reset(stub, request_id=f"r{number}")
            assert shard_of(new_id) == shard_of(episode_id)
            assert new_id != episode_id
        replayed = step(stub, ids[0][0], 0)
        assert replayed.replayed
        assert replayed.observation.frame.frame_id == first.observation.frame.frame_id
        with pytest.raises(grpc.RpcError) as caught:
            step(stub, ids[0][0], 1)
        assert reason_of(caught.value) == "MACHINE_LOST"
    finally:
        again.process.send_signal(signal.SIGTERM)
        again.wait_for(r"shard 0: (draining)")
        assert again.end() == 0
    assert not (state_dir / "shards").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shards", "0"), "--shards"),
        (("--shards", "65"), "--shards"),
        (("--shards", "3"), "pool desktop: 2 machines cannot be divided among 3 shards"),
        (("--shards", "2", "--console-listen", "127.0.0.1:0"), "console_listen: is not available with 2 shards"),
        (("--shards", "2", "--compat", "areal=127.0.0.1:0"), "compat: is not available with 2 shards"),
    ],
)
def test_shards_that_cannot_serve_are_refused_before_anything_starts(
    state_dir: Path, flags: tuple[str, ...], message: str
) -> None:
    done = run_envd("serve", "--hypervisor", "fake", "--pool", "2", "--state-dir", str(state_dir), *flags)
    assert done.status == 2
    assert message in done.err
    assert not state_dir.exists()


def test_tokens_with_quotas_are_refused(tmp_path: Path, state_dir: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"trainer run sha256:{'0' * 64} max_machines=2\n")
    done = run_envd(
        *("serve", "--hypervisor", "fake", "--pool", "2", "--shards", "2", "--state-dir", str(state_dir)),
        ENVD_SECURITY__TOKENS_FILE=str(tokens),
    )
    assert done.status == 2
    assert "max_machines is not available with several shards; remove it" in done.err


@pytest.mark.long
def test_a_shard_that_does_not_start_ends_the_daemon_and_the_other_shards(state_dir: Path) -> None:
    state_dir.mkdir()
    (state_dir / "shard-1").write_text("not a directory")
    served = ServedDaemon(state_dir, CONFIG)
    assert served.process.wait(timeout=120) == 2
    served.end()
    log = served.log_file.read_text()
    assert "shard 1: ended with status 2 before it served; see its log" in log
    assert "choose another with --state-dir" in log
    assert holder(state_dir / "shard-0") is None
