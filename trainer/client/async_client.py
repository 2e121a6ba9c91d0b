"""Opens episodes, keeps their leases and closes them, for many at once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Final, Self, Unpack

from cuaenv.v1 import env_pb2

from trainer.client.connection import Connection
from trainer.client.episode import AsyncEpisode
from trainer.client.errors import EnvError
from trainer.client.observation import read_observation
from trainer.client.options import ResetOptions, StepOptions
from trainer.client.results import Pool, Task
from trainer.client.retry import RetryPolicy
from trainer.client.view import Settle, View, wire_settle, wire_view
from trainer.client.wire import new_id, wire_duration
from trainer.security import Access, Tls

_logger = logging.getLogger(__name__)

_DEFAULT_VIEW: Final = View()


class AsyncEnvClient:
    """Reaches one daemon. May be shared by tasks and by event loops; each loop gets a connection of its own."""

    def __init__(
        self,
        target: str,
        *,
        run: str = "",
        retry: RetryPolicy | None = None,
        keep_alive_interval: timedelta | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Remember where the daemon is; the first call connects.

        Args:
            target: `HOST:PORT` or `unix:PATH`.
            run: Label of the training run, for fair share and metrics.
            retry: How lost calls are made again.
            keep_alive_interval: How often leases are renewed; by default three times in each.
            token: Shown with every call; by default the variable `ENVD_TOKEN`. Empty for none.
            tls: Files for an encrypted connection; None for clear text.

        Raises:
            ValueError: The token would travel to another host in clear text, or cannot be one.
        """
        self._connection = Connection(target, access=Access(token=token, tls=tls), retry=retry or RetryPolicy())
        self._run = run
        self._keep_alive_interval = keep_alive_interval

    @property
    def target(self) -> str:
        """Where the daemon is."""
        return self._connection.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the running loop's connection. Idempotent; another call connects again."""
        await self._connection.aclose()

    @asynccontextmanager
    async def reset(self, task: str, **options: Unpack[ResetOptions]) -> AsyncIterator[AsyncEpisode]:
        """Open one episode; options and errors are those of `reset_group`."""
        async with self.reset_group(task, size=1, **options) as episodes:
            yield episodes[0]

    @asynccontextmanager
    async def reset_group(
        self,
        task: str,
        *,
        size: int,
        pool: str = "",
        max_steps: int = 0,
        lease_ttl: timedelta = timedelta(minutes=5),
        settle: Settle | None = None,
        view: View = _DEFAULT_VIEW,
        coordinate_space: tuple[int, int] | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> AsyncIterator[Sequence[AsyncEpisode]]:
        """Open episodes of one task, all or none, keep their leases, and close them on the way out.

        If this is cancelled while it waits, what the service had begun ends with its lease.

        Args:
            task: Id of the task.
            size: How many episodes.
            pool: Where; empty for the task's own.
            max_steps: Steps after which an episode is truncated; 0 for the task's own limit.
            lease_ttl: How long machines outlive this process, 10 s to 1 h.
            settle: When a screen counts as settled, for the first observation and as the steps' default.
            view: What observations hold, for the first one and as the steps' default.
            coordinate_space: (width, height) that actions' places refer to; None for pixels of the screen.
            timeout: How long admission and setup may take.

        Raises:
            EnvError: See the module's tree.
        """
        request = env_pb2.ResetRequest(
            request_id=new_id(),
            task_id=task,
            pool=pool,
            group_size=size,
            lease_ttl=wire_duration(lease_ttl),
            max_steps=max_steps,
            run=self._run,
            settle=wire_settle(settle),
            observation=wire_view(view),
            # Shorter than our own deadline, so that the service can still say what stood in the way.
            ready_timeout=wire_duration(max(timeout - timedelta(seconds=1), timeout / 2)),
        )
        response = await self._connection.call("Reset", request, timeout)
        episodes = [
            AsyncEpisode(
                self._connection,
                info,
                read_observation(observation),
                instruction=response.instruction,
                defaults=StepOptions(settle=settle, view=view, coordinate_space=coordinate_space),
            )
            for info, observation in zip(response.episodes, response.observations, strict=True)
        ]
        async with self._kept(episodes, lease_ttl):
            yield episodes

    @asynccontextmanager
    async def fork(
        self,
        parent: AsyncEpisode,
        *,
        count: int,
        lease_ttl: timedelta = timedelta(minutes=5),
        view: View | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> AsyncIterator[Sequence[AsyncEpisode]]:
        """Branch an active episode: open copies that begin where it stands, all or none, and close them on the way out.

        The parent goes on, and the copies may outlive it. Their leases are kept meanwhile. If this is cancelled while
        it waits, what the service had begun ends with its lease.

        Args:
            parent: The episode; none of its steps may be running.
            count: How many copies.
            lease_ttl: How long their machines outlive this process, 10 s to 1 h.
            view: What their first observations hold; by default what the parent's reset said.
            timeout: How long admission and copying may take.

        Raises:
            NotForkable: It cannot be branched where it stands; it goes on.
            EnvError: See the module's tree.
        """
        request = env_pb2.ForkRequest(
            request_id=new_id(),
            episode_id=parent.episode_id,
            step_index=parent.step_count,
            fork_count=count,
            lease_ttl=wire_duration(lease_ttl),
            observation=wire_view(parent.chosen_view(view), known=parent.observation),
        )
        seen = parent.observation
        response = await self._connection.call("Fork", request, timeout)
        episodes = [
            AsyncEpisode(
                self._connection,
                info,
                read_observation(observation, seen),
                instruction=parent.instruction,
                defaults=parent.defaults,
            )
            for info, observation in zip(response.episodes, response.observations, strict=True)
        ]
        async with self._kept(episodes, lease_ttl):
            yield episodes

    async def list_tasks(self, *, suite: str = "", timeout: timedelta = timedelta(seconds=30)) -> list[Task]:
        """Return the tasks that can be attempted, in id order. Raises: EnvError."""
        tasks: list[Task] = []
        token = ""
        while True:
            request = env_pb2.ListTasksRequest(suite=suite, page_size=1000, page_token=token)
            response = await self._connection.call("ListTasks", request, timeout)
            tasks += [
                Task(task_id=task.task_id, instruction=task.instruction, level=task.level, suite=task.suite)
                for task in response.tasks
            ]
            token = response.next_page_token
            if not token:
                return tasks

    async def list_pools(self, *, timeout: timedelta = timedelta(seconds=30)) -> list[Pool]:
        """Return the daemon's pools as they are now. Raises: EnvError."""
        response = await self._connection.call("ListPools", env_pb2.ListPoolsRequest(), timeout)
        return [
            Pool(
                name=pool.name,
                image=pool.image,
                accelerator=pool.accelerator,
                capacity=pool.capacity_count,
                idle_count=pool.idle_count,
                leased_count=pool.leased_count,
                waiting_count=pool.waiting_count,
                problem=pool.problem,
            )
            for pool in response.pools
        ]

    @asynccontextmanager
    async def _kept(self, episodes: Sequence[AsyncEpisode], lease_ttl: timedelta) -> AsyncIterator[None]:
        """Keep episodes' leases, and close them on the way out."""
        ids = [episode.episode_id for episode in episodes]
        keeper = asyncio.create_task(self._keep_leases(ids, lease_ttl), name=f"keep-leases:{ids[0]}")
        try:
            yield
        finally:
            keeper.cancel()
            await finish(asyncio.gather(*(episode.close() for episode in episodes)))

    async def _keep_leases(self, episode_ids: Sequence[str], lease_ttl: timedelta) -> None:
        interval = self._keep_alive_interval or lease_ttl / 3
        request = env_pb2.KeepAliveRequest(episode_ids=episode_ids, lease_ttl=wire_duration(lease_ttl))
        while True:
            await asyncio.sleep(interval.total_seconds())
            try:
                response = await self._connection.call("KeepAlive", request, lease_ttl / 3)
            except EnvError as error:
                # The episode's own calls will say what is wrong, if it stays wrong.
                _logger.warning("episodes %s: lease not renewed: %s", ", ".join(episode_ids), error)
                continue
            if not response.episodes:
                return


async def finish(work: Awaitable[object]) -> None:
    """Wait until the work is done; a cancellation meanwhile is delivered afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
