"""swtpm processes of machines: start, marks, end. With the real swtpm, and a test in the place of QEMU."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from envd.base.errors import HypervisorError
from envd.hypervisor.qemu import tpm as tpm_module
from envd.hypervisor.qemu.processes import tpm_processes
from envd.hypervisor.qemu.snapshots.files import QemuFiles
from envd.hypervisor.qemu.tpm import Tpm
from envd.hypervisor.qemu.user import Account, QemuUser

OWNER = "0badcafe"
USER = QemuUser(account=None, why="test")
#: Commands of swtpm's control channel (swtpm_ioctls(3)).
GET_CAPABILITY, SET_DATA_CHANNEL = (number.to_bytes(4, "big") for number in (1, 16))


@pytest.fixture
def files() -> Iterator[QemuFiles]:
    # Below /tmp, because the path of a socket is limited.
    directory = Path(mkdtemp(prefix="envd-t-"))
    yield QemuFiles(directory=directory)
    shutil.rmtree(directory)


@pytest.fixture
def start(files: QemuFiles) -> Iterator[Callable[..., Tpm]]:
    started = []

    def start(*, state: Path | None = None) -> Tpm:
        started.append(Tpm.start(files, owner=OWNER, machine_id="m1", state=state, user=USER))
        return started[-1]

    yield start
    for tpm in started:
        tpm.end()


def connect(files: QemuFiles) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(60)
    channel.connect(str(files.tpm_socket))
    channel.sendall(GET_CAPABILITY)
    assert len(channel.recv(64)) == 8
    return channel


def test_a_tpm_answers_on_its_socket_and_is_found_by_its_mark(files: QemuFiles, start: Callable[..., Tpm]) -> None:
    tpm = start()
    with connect(files):
        assert not tpm.has_ended
        assert set(tpm_processes(OWNER).values()) == {"m1"}
        assert tpm_processes("00000000") == {}
    assert files.tpm_state.parent.stat().st_mode & 0o777 == 0o700


def test_a_tpm_ends_when_its_machine_disconnects(files: QemuFiles, start: Callable[..., Tpm]) -> None:
    tpm = start()
    data, other = socket.socketpair()
    with connect(files) as channel, data, other:
        socket.send_fds(channel, [SET_DATA_CHANNEL], [other.fileno()])
        assert channel.recv(64) == bytes(4)
        assert set(tpm_processes(OWNER).values()) == {"m1"}
    assert tpm_module._is_readable(tpm._handle or -1, within_s=60)
    assert tpm.has_ended
    tpm.end()


def test_a_tpm_that_no_machine_used_is_ended_too(start: Callable[..., Tpm]) -> None:
    tpm = start()
    tpm.end()
    tpm.end()
    assert tpm.has_ended
    assert tpm_processes(OWNER) == {}


def test_a_later_daemon_finds_and_ends_a_tpm(files: QemuFiles, start: Callable[..., Tpm]) -> None:
    own = start()
    # A process has no command line for a moment after its start.
    with connect(files):
        found = Tpm.find(owner=OWNER, machine_id="m1")
        assert found is not None
        assert Tpm.find(owner=OWNER, machine_id="m2") is None
        found.end()
    assert own.has_ended


def test_a_tpm_gets_a_copy_of_its_images_state(files: QemuFiles, start: Callable[..., Tpm], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"state")
    start(state=state)
    assert files.tpm_state.read_bytes() == b"state"
    assert files.tpm_state.stat().st_mode & 0o777 == 0o600


def test_a_missing_swtpm_is_an_error_with_its_name(start: Callable[..., Tpm], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HypervisorError, match=r"m1: .*swtpm"):
        start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_a_tpm_runs_as_qemus_user(files: QemuFiles) -> None:
    account = Account.of("daemon")
    assert account is not None
    user = QemuUser(account=account, why="test")
    user.chown(files.directory)
    tpm = Tpm.start(files, owner=OWNER, machine_id="m1", state=None, user=user)
    try:
        with connect(files):
            (pid,) = tpm_processes(OWNER)
            status = Path(f"/proc/{pid}/status").read_text()
            assert f"Uid:\t{account.user_id}\t{account.user_id}" in status
            assert f"Gid:\t{account.group_id}\t{account.group_id}" in status
            assert "Groups:\t \n" in status
        assert files.tpm_socket.stat().st_uid == files.tpm_state.parent.stat().st_uid == account.user_id
    finally:
        tpm.end()
