"""Which of several connections to a daemon reaches an episode's process without a relay. Pure.

A daemon with several processes accepts connections in all of them, on one address: a client cannot choose the process
of a connection. But each response that another process had to give names that process. New connections are then tried
until one reaches it, also after the process was restarted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: The connection that is never replaced.
FIRST: Final = 0
#: Connections tried one after the other: of 4 processes one is missed by 16 connections in 1 % of all cases.
_QUICK_TRIES: Final = 16
#: Then one more at this interval: a load balancer may send all connections of a client to one process.
_TRY_INTERVAL_S: Final = 10.0


@dataclass(slots=True)
class _Route:
    connection: int = FIRST
    try_count: int = 0
    """Connections tried since one reached the process."""
    next_try_s: float = 0.0


class Routes:
    """The connections of episodes, by number, learned from responses."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Start without any knowledge: all calls use the first connection. `monotonic` is the clock in seconds."""
        self._monotonic = monotonic
        self._process_of: dict[str, str] = {}
        self._routes: dict[str, _Route] = {}
        self._last = FIRST

    @property
    def connections(self) -> set[int]:
        """Numbers of the connections that new calls use."""
        return {FIRST, *(route.connection for route in self._routes.values())}

    def connection_of(self, episode_id: str) -> int:
        """Return the number of the connection for a call about an episode."""
        process = self._process_of.get(episode_id)
        return FIRST if process is None else self._routes[process].connection

    def note_direct(self, episode_id: str) -> None:
        """Record that a call over the episode's connection reached its process."""
        if process := self._process_of.get(episode_id):
            self._routes[process].try_count = 0

    def note_relay(self, episode_id: str, *, connection: int, process: str) -> bool:
        """Record that a call over a connection was relayed to the episode's process; return whether to try another."""
        self._process_of[episode_id] = process
        route = self._routes.setdefault(process, _Route())
        now_s = self._monotonic()
        if route.connection != connection or (route.try_count >= _QUICK_TRIES and now_s < route.next_try_s):
            return False
        self._last += 1
        route.connection = self._last
        route.try_count += 1
        route.next_try_s = now_s + _TRY_INTERVAL_S
        return True

    def forget(self, episode_id: str) -> None:
        """Forget an episode that is closed."""
        self._process_of.pop(episode_id, None)
