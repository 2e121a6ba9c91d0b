"""What the calls of an episode service share: its collaborators, and how they resume a guest and report failures."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from envd.base.clock import Clock
from envd.base.config import LimitsConfig, SettlePolicy
from envd.base.errors import Draining, EnvdError, GuestError, GuestUnresponsive
from envd.base.telemetry import traces
from envd.base.telemetry.metrics import Metrics
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.observation import Encoding, Observation, ObservationOptions
from envd.episodes.checkpoints.parking import Parking
from envd.episodes.episode import Episode
from envd.episodes.journal import Journal
from envd.episodes.ledger import Answer, Ledger, RequestKey
from envd.episodes.members import TaskStates
from envd.episodes.registry import EpisodeRegistry
from envd.pool.leased import FrozenDesktop, LeasedMachine
from envd.pool.pool import MachinePool
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.checkers.base import Judge, judge_directly
from envd.tasks.user_model import UserModel

T = TypeVar("T")


def draining_error() -> Draining:
    """Return the error for calls that a stopping daemon no longer starts."""
    return Draining("the daemon is draining and opens no more episodes; try another host", retry_after_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """Collaborators of one episode service."""

    registry: EpisodeRegistry
    journal: Journal
    tasks: TaskCatalogue
    states: TaskStates
    """Frozen starts of tasks, and what discards them."""
    pools: Mapping[str, MachinePool]
    limits: LimitsConfig
    clock: Clock
    metrics: Metrics
    parking: Parking
    make_id: Callable[[], str]
    """Makes the unique part of episode and group ids: at most 32 of [a-z0-9]."""
    requests: Ledger
    """Resets and scores; those to an episode are in its own."""
    user_model: UserModel | None = None
    """Answers for users of tasks that have a persona; None if no endpoint is set."""
    judge: Judge = judge_directly
    """Matches questions of agents with the facts that users know."""

    def new_group_id(self) -> str:
        return f"group-{self.make_id()}"

    def new_episode_id(self) -> str:
        return f"ep-{self.make_id()}"

    def new_ledger(self, episode_id: str) -> Ledger:
        """Return an empty ledger for the requests of an episode."""
        return Ledger(
            clock=self.clock,
            abandoned=lambda: self.registry.not_found(episode_id),
            on_dropped=self.journal.forget_answer,
            close_group=self.registry.close_group,
        )

    async def once(self, request: RequestKey, work: Callable[[Episode], Coroutine[Any, Any, T]]) -> Answer[T]:
        """Perform a request on an episode once, in a task of its own, and renew the episode's lease; see `Ledger`.

        Raises: EpisodeNotFound, RequestIdReused, and what `work` raises.
        """
        episode = self.registry.get(request.scope)
        episode.lease.renew(self.clock.monotonic())
        return await episode.requests.answer(request, lambda: work(episode))

    @asynccontextmanager
    async def call(
        self, episode: Episode, *, renews: bool = True, needs_machine: bool = True, watch: Stopwatch | None = None
    ) -> AsyncIterator[None]:
        """Keep an episode's lease from expiring and its machine in memory during the block; see `EpisodeRegistry.call`.

        Waiting for the machine of a parked episode is the phase `unpark` of `watch`. Raises: as `Parking.resume`.

        Args:
            needs_machine: Whether a parked episode gets one, as far as is known before the block.
        """
        try:
            async with self.registry.call(episode, renews=renews):
                parked = episode.machine
                if needs_machine:
                    await self.parking.resume(episode)
                if watch is not None and parked is not episode.machine:
                    watch.lap("unpark")
                yield
        finally:
            self.parking.call_ended(episode)

    @asynccontextmanager
    async def running(self, episode: Episode, watch: Stopwatch) -> AsyncIterator[LeasedMachine]:
        """Keep the guest running during the block; yields its machine. Resuming it is the phase `resume` of `watch`.

        A guest that does not resume voids the episode. Raises: MachineLost.
        """
        machine = episode.machine
        async with AsyncExitStack() as stack:
            try:
                resume_ms = await stack.enter_async_context(machine.running())
            except EnvdError as error:
                if machine is episode.machine:  # it was not rolled back meanwhile
                    await self.registry.lose(episode, error)
                    episode.require_machine()
                raise
            if resume_ms > 0:  # otherwise its time counts toward the next phase
                watch.lap("resume")
            yield machine

    async def freeze(
        self, episode: Episode, step_index: int, *, epoch: int = 0, check: Callable[[], None] = lambda: None
    ) -> FrozenDesktop:
        """Freeze an episode's machine when no other call uses it, if the episode is at this step; `check` may refuse.

        A guest that fails meanwhile voids the episode. Raises: as `Episode.require_step` and `MachinePool.freeze`.
        """
        async with episode.lock:
            episode.require_step(step_index, epoch=epoch)
            check()
            try:
                with traces.timed("freeze"):
                    return await self.pools[episode.spec.pool].freeze(episode.machine)
            except (GuestUnresponsive, GuestError) as error:
                raise await self.registry.lose(episode, error) from error

    async def with_pixels(self, observation: Observation, episode_id: str, options: ObservationOptions) -> Observation:
        """Return a recorded observation, with its pixels if the screen still shows them. Resumes no guest."""
        episode = self.registry.find(episode_id)
        if options.encoding is Encoding.NONE or episode is None or episode.machine.lost.is_set():
            return observation
        desktop = episode.machine.desktop
        try:
            frame = await desktop.frame()
            if frame.frame_id != observation.frame.frame_id:
                return observation
            encoded = await desktop.encode(frame, options)
        except EnvdError:
            return observation  # the recorded response is valid even if the machine fails now
        return replace(observation, frame=replace(encoded, capture_time=observation.frame.capture_time))

    def settle_policy(self, episode: Episode, requested: SettlePolicy | None) -> SettlePolicy:
        """Return when the episode's screen counts as settled, with the regions that its pool ignores."""
        return (requested or episode.spec.settle).ignoring(
            self.pools[episode.spec.pool].settings.settle.ignored_regions
        )

    def count_failure(self, episode: Episode, operation: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, EnvdError) else EnvdError.reason
        self.metrics.episode_failed(pool=episode.spec.pool, operation=operation, reason=reason)
