"""SGLang's own server as a process on this machine's CPU."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 900.0


@contextmanager
def router_of(engine: "SglangProcess", log_file: Path) -> Iterator[int]:
    """Run SGLang's router in front of an engine; yields its port."""
    port, metrics_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", engine.host, "--port", str(port)),
        *("--worker-urls", engine.url, "--disable-circuit-breaker", "--disable-health-check"),
        *("--prometheus-host", engine.host, "--prometheus-port", str(metrics_port)),
    ]
    with log_file.open("ab") as log:
        router = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until_answering(router, f"http://{engine.host}:{port}/workers", log_file)
        yield port
    finally:
        os.killpg(router.pid, signal.SIGKILL)
        router.wait()


def free_port() -> int:
    """Return a free loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _wait_until_answering(process: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    """Wait for an answer. Raises: RuntimeError: The process ended, or took too long."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(url, timeout=30):  # noqa: S310 -- loopback
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    words = log_file.read_text(encoding="utf-8", errors="replace")[-4000:]
    raise RuntimeError(f"{url}: no answer (exit status {process.poll()}):\n{words}")


class SglangProcess:
    """One server on a free loopback port. Use as a context manager."""

    def __init__(self, checkpoint: Path, log_file: Path, *flags: str, overlay: Path | None = None) -> None:
        """Prepare; entering starts it and waits until it serves.

        Args:
            checkpoint: The model.
            log_file: Its output is appended to this file.
            flags: More flags of SGLang.
            overlay: Directory with a package `sglang` to use instead of the installed one.
        """
        self.host = "127.0.0.1"
        self.port = free_port()
        self._command = [
            *(sys.executable, "-m", "tests.support.sglang_cpu", "--model-path", str(checkpoint)),
            *("--host", self.host, "--port", str(self.port), *flags),
        ]
        self._paths: Sequence[Path] = [*([overlay] if overlay else []), ROOT, ROOT / "proto"]
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process; it loads for a minute or more."""
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self._paths))},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises: RuntimeError: It ended, or took too long."""
        assert self._process is not None
        try:
            _wait_until_answering(self._process, f"{self.url}/health", self._log_file)
        except RuntimeError:
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL to all its processes."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
