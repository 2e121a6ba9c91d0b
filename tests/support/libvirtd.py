"""A libvirtd for tests on real machines, separate from the host's, that can be stopped and restarted."""

import signal
import socket
import subprocess
import time
from pathlib import Path

#: Private mounts, so that no other libvirtd's run-time files are changed. Needs root.
_PRIVATE_MOUNTS = (
    'mkdir -p /run/libvirt && mount --bind "$0/run" /run/libvirt && mount --bind "$0/qemu.conf" /etc/libvirt/qemu.conf'
    ' && exec "$@"'
)
_START_TIMEOUT_S = 60.0


class Libvirtd:
    """libvirtd and virtlogd with their sockets and run-time files in a directory. QEMUs outlive it."""

    def __init__(self, directory: Path) -> None:
        """Create `directory`, whose path must be short, and start libvirtd."""
        self._directory = directory
        (directory / "run").mkdir(parents=True)
        # A user that can open /dev/kvm, if it exists: otherwise libvirt probes QEMU again for every machine.
        (directory / "qemu.conf").write_text('user = "root"\ngroup = "root"\n', encoding="utf-8")
        self._config = directory / "libvirtd.conf"
        self._config.write_text(f'unix_sock_dir = "{directory}"\nauth_unix_rw = "none"\n', encoding="utf-8")
        self._socket = directory / "libvirt-sock"
        self._logd = self._spawn("virtlogd")
        self._wait_for(directory / "run" / "virtlogd-sock")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def uri(self) -> str:
        """Value for envd's `hypervisor.uri`."""
        return f"qemu+unix:///system?socket={self._socket}"

    def start(self) -> None:
        """Start libvirtd and wait until it accepts connections."""
        pid_file = self._directory / "libvirtd.pid"
        self._process = self._spawn("libvirtd", "--config", str(self._config), "--pid-file", str(pid_file))
        self._wait_for(self._socket)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal and wait for its exit. Idempotent."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=60)
            self._process = None

    def close(self) -> None:
        """End libvirtd and its virtlogd."""
        self.end()
        self._logd.terminate()
        self._logd.wait(timeout=60)

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        wrapper = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _PRIVATE_MOUNTS, str(self._directory)]
        return subprocess.Popen(
            [*wrapper, f"/usr/sbin/{program}", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    @staticmethod
    def _wait_for(path: Path) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no process listens on {path} after {_START_TIMEOUT_S:g} s")
            time.sleep(0.1)
