"""Fork an episode: reserve capacity for the copies, freeze the parent, then fork the copies from that state.

The parent is paused only while it is frozen, and does not queue during that time. Knows no ledger; creates no episodes.
"""

from collections.abc import Callable

from envd.base.clock import Clock
from envd.base.errors import GuestError, GuestUnresponsive, MachineLost, SetupFailed
from envd.base.telemetry import traces
from envd.base.telemetry.traces import Stopwatch
from envd.episodes.episode import Episode
from envd.episodes.members import Group, start_from
from envd.episodes.perform import check_region
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.types import ForkCommand
from envd.pool.leased import FrozenDesktop
from envd.pool.pool import Pool


async def fork_group(
    pool: Pool,
    parent: Episode,
    command: ForkCommand,
    *,
    registry: EpisodeRegistry,
    last_use: Callable[[FrozenDesktop], Callable[[], None]],
    clock: Clock,
) -> Group:
    """Copy an episode's machine, all copies or none. The caller keeps the parent's lease from expiring.

    On failure and on cancellation no machine, reservation or state is kept. The parent is unchanged, unless its own
    machine or guest failed: then it is void. Timings: `acquire`, `pause`, `copy`, `start` (of the slowest copy) and
    `total`.

    Args:
        last_use: Gets the frozen state at once; returns what to call after the last fork, which discards it.
    """
    pool.require_copies()
    watch = Stopwatch(clock)
    # During a step the parent's next step index is not known yet, so check only after it.
    if not parent.turn.locked():
        _check(parent, command)
    # The parent keeps its machine, so the run cannot free it for the copies.
    granted = await pool.lease(
        0,
        reserved=command.fork_count,
        run=parent.spec.run,
        owner=parent.spec.owner,
        retained_count=1,
        timeout_s=command.timeout_s,
    )
    watch.lap("acquire")
    try:
        frozen = await freeze_at(
            pool, parent, command.step_index, registry=registry, check=lambda: _check(parent, command)
        )
        progress = parent.progress  # of the frozen state: the parent continues only at the next await
        release = last_use(frozen)
        subject, starting = f"fork of episode {command.episode_id}", Stopwatch(clock)
        try:
            with traces.timed("start"):
                members = await start_from(
                    pool, frozen, granted.reservations, options=command.observe, subject=subject, watch=starting
                )
        except MachineLost as error:
            # A copy died, which the caller does not know yet: do not blame the parent.
            raise SetupFailed(f"{subject}: {error}") from error
        finally:
            release()
    except BaseException:
        await pool.release(granted.reservations)
        raise
    report = frozen.snapshot.report
    timings_ms = {
        **watch.timings_ms,
        "pause": report.paused_ms,
        "copy": report.total_ms,
        "start": starting.timings_ms["fork"],
        "total": watch.total_ms,
    }
    return Group(members=members, progress=progress, timings_ms=timings_ms)


def _check(parent: Episode, command: ForkCommand) -> None:
    parent.require_step(command.step_index, epoch=command.epoch)
    check_region(command.observe, parent.machine.desktop.screen_size)


async def freeze_at(
    pool: Pool,
    episode: Episode,
    step_index: int,
    *,
    registry: EpisodeRegistry,
    epoch: int = 0,
    check: Callable[[], None] | None = None,
) -> FrozenDesktop:
    """Freeze an episode's machine when no other call uses it, if the episode is at this step; `check` may refuse."""
    async with episode.turn:
        episode.require_step(step_index, epoch=epoch)
        if check is not None:
            check()
        try:
            with traces.timed("freeze"):
                return await pool.freeze(episode.machine)
        except (GuestUnresponsive, GuestError) as error:
            raise await registry.lose(episode, error) from error
