"""Drawn desktops served from a thread with an event loop of its own, for tests of clients with and without a loop."""

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cuaenv.loop_thread import LoopThread
from tests.support.server import FakeServer, serve_fake

T = TypeVar("T")


class DrawnDesktops:
    """A server; options are those of `serve_fake`."""

    def __init__(self, **options: Any) -> None:
        self._thread = LoopThread("desktops")
        self._serving = serve_fake(**options)
        self.server: FakeServer = self._run(self._serving.__aenter__())
        self.address = self.server.address

    def close(self) -> None:
        """Stop the server and the thread."""
        self._thread.close(lambda: self._serving.__aexit__(None, None, None))

    @property
    def leased_count(self) -> int:
        """Machines that episodes hold."""
        return self._ask(lambda: self.server.pool.statistics().leased_count)

    @property
    def waiting_count(self) -> int:
        """Episodes that wait for a machine."""
        return self._ask(lambda: self.server.pool.statistics().waiting_count)

    @property
    def used_count(self) -> int:
        """Machines that had input."""
        return self._ask(lambda: sum(bool(machine.input_count) for machine in self._machines()))

    def kill_used_machines(self) -> None:
        """Kill all machines that had input."""
        self._ask(lambda: [machine.kill("killed by a signal") for machine in self._machines() if machine.input_count])

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, at most a minute, for what may take a while."""
        end_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end_s, "did not happen within a minute"
            time.sleep(0.01)

    def wait_returned(self) -> None:
        """Wait until no machine is leased or waited for."""
        self.wait_until(lambda: self.leased_count + self.waiting_count == 0)

    def _machines(self) -> list[Any]:
        return list(self.server.hypervisor.machines.values())

    def _ask(self, question: Callable[[], T]) -> T:
        async def ask() -> T:
            return question()

        return self._run(ask())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.start(work).result(120)
