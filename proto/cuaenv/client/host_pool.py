"""The hosts of one client in one event loop: opens episodes where its placement says, and asks all hosts.

Counts need no lock: code between two awaits is atomic.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from cuaenv.client.credentials import Access
from cuaenv.client.drawn_placement import DrawnPlacement, OpenRequest
from cuaenv.client.episode import AsyncEpisode, close_all
from cuaenv.client.errors import DeadlineExceeded, EnvError, EpisodeNotFound, NotFound, Unavailable
from cuaenv.client.host import Host, HostStatistics
from cuaenv.client.limiter import EpisodeLimiter, ResetPacer
from cuaenv.client.observation import Observation
from cuaenv.client.placement import RetryPolicy, next_attempt, retry_pause_s
from cuaenv.client.view import StepOptions, View, wire_settle, wire_view
from cuaenv.v1 import env_pb2
from cuaenv.wire import wire_duration

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_CLOSE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """Statistics of a client in one event loop."""

    hosts: tuple[HostStatistics, ...]
    gated_count: int
    """Episodes that wait because of `max_episodes`."""


class HostPool:
    """Opens episodes on hosts, and holds them until they are closed."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        access: Access,
        retry: RetryPolicy,
        keep_alive_interval: timedelta | None,
        max_episodes: int | None,
        rng: random.Random,
    ) -> None:
        """Prepare; nothing is connected yet."""
        self.episodes: set[AsyncEpisode] = set()
        """Those that are open here."""
        self._limiter = EpisodeLimiter(max_episodes)
        self._pacer = ResetPacer()
        self._retry = retry
        self._rng = rng
        self._placement = DrawnPlacement(
            targets, access=access, retry=retry, keep_alive_interval=keep_alive_interval, rng=rng
        )

    def __repr__(self) -> str:
        return f"<HostPool {self._placement}, {self._limiter}>"

    @property
    def may_choose(self) -> bool:
        """Whether episodes may be opened on one host or another."""
        return self._placement.only_host is None

    def statistics(self) -> ClientStatistics:
        hosts = tuple(host.statistics() for host in self._placement.known)
        return ClientStatistics(hosts=hosts, gated_count=self._limiter.waiting_count)

    async def wait_until_idle(self, timeout: timedelta) -> None:
        """Return when no episode is open or being opened, or after `timeout`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                while any(len(host.leases) or host.opener.open_count for host in self._placement.known):
                    await self._placement.changed.wait()

    async def aclose(self) -> None:
        """End the openings, for which it waits at most 20 s, close the episodes, then disconnect. Idempotent."""
        # First the openings: one that waits would get the machine of an episode that is closed.
        await self._placement.aclose()
        await asyncio.gather(*(host.opener.aclose(_CLOSE_TIMEOUT_S) for host in self._placement.known))
        while self.episodes:  # more may be attached meanwhile
            await close_all(list(self.episodes))
        await asyncio.gather(*(host.aclose() for host in self._placement.known))

    async def reset(self, opening: OpenRequest) -> Sequence[AsyncEpisode]:
        """Open episodes of a task or checkpoint: paced while resets fail, and within `max_episodes`.

        If cancelled, the opening is ended at its host, in the background.

        Raises:
            EnvError: None were opened; or no response came, and leases end what was opened.
            ValueError: They are more than `max_episodes`.
        """
        await self._pacer.wait(opening.task)
        await self._limiter.acquire(opening.size)
        try:
            episodes = await self.open(opening)
        except BaseException as error:
            self._limiter.release(opening.size)
            if isinstance(error, EnvError):
                self._pacer.note_failure(opening.task, error)
            raise
        self._pacer.note_success(opening.task)
        for episode in episodes:
            episode.when_closed(self._limiter.release)
        episodes[0].host.note_pool(opening.task, episodes[0].pool)
        return episodes

    async def open(self, opening: OpenRequest) -> Sequence[AsyncEpisode]:
        """Open episodes on one host.

        If cancelled, the opening is ended at its host, in the background.

        Raises:
            EnvError: None were opened; or no response came, and leases end what was opened.
        """
        opening.deadline_s = asyncio.get_running_loop().time() + opening.timeout.total_seconds()
        host, response = await self._opened(opening)
        for info in response.episodes:
            host.leases.take(info.episode_id, opening.lease_ttl)
        try:
            observations = await _observations_of(response, host, opening.seen)
        except BaseException:
            for info in response.episodes:
                host.leases.begin_close(info.episode_id)
            raise
        instruction = response.instruction if opening.instruction is None else opening.instruction
        return [
            self._hold(
                AsyncEpisode(
                    host,
                    info,
                    observation,
                    instruction=instruction,
                    defaults=opening.defaults,
                    opening_timings_ms=response.timings_ms,
                )
            )
            for info, observation in zip(response.episodes, observations, strict=True)
        ]

    async def attach(
        self, episode_id: str, *, lease_ttl: timedelta, keep_open: bool, defaults: StepOptions, timeout: timedelta
    ) -> AsyncEpisode:
        """Renew the lease of an open episode, and observe it. Raises: EnvError."""
        renewal = env_pb2.KeepAliveRequest(episode_ids=[episode_id], lease_ttl=wire_duration(lease_ttl))

        async def find(host: Host) -> tuple[Host, env_pb2.Episode]:
            response = await host.connection.call("KeepAlive", renewal, timeout)
            for info in response.episodes:
                return host, info
            raise EpisodeNotFound(
                f"episode {episode_id}: not open, with this token, on a host that responds; reset a new one",
                code="NOT_FOUND",
            )

        host, info = (await self.find_all(find, timeout=timeout))[0]
        request = env_pb2.ObserveRequest(
            episode_id=episode_id,
            observation=wire_view(defaults["view"] or View()),
            settle=wire_settle(defaults["settle"]),
        )
        observation = await host.decode((await host.connection.call("Observe", request, timeout)).observation)
        listing = env_pb2.ListTasksRequest(task_ids=[info.task_id])
        tasks = (await host.connection.call("ListTasks", listing, timeout)).tasks
        host.leases.take(episode_id, lease_ttl)
        instruction = tasks[0].instruction if tasks else ""
        return self._hold(
            AsyncEpisode(host, info, observation, instruction=instruction, defaults=defaults, keep_open=keep_open)
        )

    def _hold(self, episode: AsyncEpisode) -> AsyncEpisode:
        """Close an episode with the client unless it is closed before; return it."""
        self.episodes.add(episode)
        episode.when_closed(lambda: self.episodes.discard(episode))
        return episode

    async def _opened(self, opening: OpenRequest) -> tuple[Host, Any]:
        """Return the host that opened episodes, and its response. Raises: those of `open`."""
        only = opening.host or self._placement.only_host
        if opening.target:
            only = await self.host(opening.target, timeout=opening.timeout)
        while True:
            host = only or await self._placement.place(opening)
            try:
                return host, await host.opener.open(
                    opening.request_for(host),
                    size=opening.size,
                    deadline_s=opening.deadline_s,
                    may_abandon=only is None,
                )
            except EnvError as error:
                if isinstance(error, DeadlineExceeded) and opening.error is not None:
                    # The earlier error says more than the timeout of its retry.
                    raise opening.error from error
                opening.error = error
                if only is None:
                    self._placement.failed(opening, host, error)
                else:
                    await self._pause(opening, only, error)

    async def _pause(self, opening: OpenRequest, host: Host, error: EnvError) -> None:
        """Wait before the only possible host is asked again. Raises: EnvError: the error, if it is final."""
        loop = asyncio.get_running_loop()
        pause_s = retry_pause_s(error, attempt=0, policy=self._retry, jitter=self._rng.random())
        if next_attempt(error) != "later" or pause_s is None or loop.time() + pause_s >= opening.deadline_s:
            raise error
        await host.opener.pause(pause_s)
        if loop.time() >= opening.deadline_s:  # the sleep overran
            raise error

    async def host(self, target: str, *, timeout: timedelta) -> Host:
        """Return the host with this address. Raises: EnvError: it is not one of the hosts, or none is known."""
        for host in await self._hosts(timeout):
            if host.target == target:
                return host
        raise Unavailable(f"host {target}: not among this client's hosts that are up", host=target)

    async def _hosts(self, timeout: timedelta) -> Sequence[Host]:
        return await self._placement.hosts(asyncio.get_running_loop().time() + timeout.total_seconds())

    async def call_all(self, call: Callable[[Host], Awaitable[Result]], *, timeout: timedelta) -> list[Result]:
        """Return the results of all hosts, without those that fail unless all do. Raises: EnvError."""
        hosts = await self._hosts(timeout)
        if len(hosts) == 1:
            try:
                return [await call(hosts[0])]
            except EnvError as error:
                raise error.with_traceback(None) from None
        results = await asyncio.gather(*(call(host) for host in hosts), return_exceptions=True)
        succeeded: list[Result] = []
        failed: list[EnvError] = []
        for host, result in zip(hosts, results, strict=True):
            if not isinstance(result, BaseException):
                succeeded.append(result)
            elif isinstance(result, EnvError):
                logger.warning("%s is skipped: %s", host.target, result)
                failed.append(result)
            else:
                raise result
        if not succeeded:
            raise failed[0]
        return succeeded

    async def find_all(self, call: Callable[[Host], Awaitable[Result]], *, timeout: timedelta) -> list[Result]:
        """Return the results of the hosts that have something.

        Raises:
            EnvError: `NotFound` if no host that responds has it.
        """
        missing: list[NotFound] = []

        async def found_on(host: Host) -> list[Result]:
            try:
                return [await call(host)]
            except NotFound as error:
                missing.append(error)
                return []

        found = [result for results in await self.call_all(found_on, timeout=timeout) for result in results]
        if not found:
            raise missing[0].with_traceback(None)
        return found


async def _observations_of(response: Any, host: Host, seen: Observation | None) -> Sequence[Observation]:
    """Return the observations of a response, which has each image once. Raises: SampleVoid."""
    shown = {seen.image_id: seen} if seen else {}
    observations: list[Observation] = []
    for message in response.observations:
        observation = await host.decode(message, shown.get(message.frame.unchanged.base_image_id, seen))
        if message.frame.WhichOneof("content"):
            shown[observation.image_id] = observation
        observations.append(observation)
    return observations
