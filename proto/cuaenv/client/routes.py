"""Which of several connections to a daemon reaches an episode's process without a relay. Pure.

A daemon with several processes accepts connections in all of them, on one address: a client cannot choose the process
of a connection. But each response that another process had to give names that process.
"""

from typing import Final

#: With 8 connections one of 4 processes is missed in 10 % of all cases, and one of 2 in 1 %. Its calls are relayed.
MAX_CONNECTIONS: Final = 8


class Routes:
    """The connections of episodes, learned from responses. Without any relay all calls use connection 0."""

    def __init__(self) -> None:
        self._process_of: dict[str, str] = {}
        self._connection_of: dict[str, int] = {}

    def connection_of(self, episode_id: str) -> int:
        """Return the number of the connection for a call about an episode."""
        return self._connection_of.get(self._process_of.get(episode_id, ""), 0)

    def note_relay(self, episode_id: str, *, connection: int, process: str) -> None:
        """Record that a call over a connection was relayed to the episode's process: another one is tried next."""
        self._process_of[episode_id] = process
        if self._connection_of.get(process, 0) == connection:
            self._connection_of[process] = (connection + 1) % MAX_CONNECTIONS

    def forget(self, episode_id: str) -> None:
        """Forget an episode that is closed."""
        self._process_of.pop(episode_id, None)
