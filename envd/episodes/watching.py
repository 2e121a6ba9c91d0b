"""Watch an episode's screen until it is closed: always the newest frame, never a backlog.

Watching does not renew the lease, wake or resume the machine, or send input.
"""

from collections.abc import AsyncGenerator

from envd.base.aio import race
from envd.base.clock import Clock, wait_until
from envd.base.errors import MachineLost
from envd.episodes.episode import Episode
from envd.episodes.registry import EpisodeRegistry
from envd.guest.desktop import ScreenView


async def views_of(
    episode: Episode, *, max_rate_hz: float, registry: EpisodeRegistry, clock: Clock
) -> AsyncGenerator[ScreenView, None]:
    """Yield an episode's screen and pointer at once and after each change, until it is closed. Encodes nothing."""
    while not episode.closed.is_set():
        began_s = clock.monotonic()
        machine = episode.machine
        changed = machine.desktop.changed
        try:
            view = await machine.desktop.screen_view()
        except MachineLost as error:
            if episode.closed.is_set():
                return
            if machine is not episode.machine:  # rolled back
                continue
            raise await registry.lose(episode, error) from error
        yield view
        await race(changed, episode.closed, machine.lost)
        if not episode.closed.is_set():
            await wait_until(clock, began_s + 1 / max_rate_hz, or_event=episode.closed)
