"""What the hosts of a client have: their releases, tasks, pools, episodes and checkpoints."""

import itertools
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any, Final

from cuaenv.argument_types import checks_arguments
from cuaenv.client.host import Host
from cuaenv.client.host_pool import HostPool
from cuaenv.client.results import (
    Checkpoint,
    EpisodeInfo,
    Pool,
    Server,
    Task,
    read_checkpoint,
    read_episode,
    read_pool,
    read_server,
    read_task,
)
from cuaenv.v1 import env_pb2

#: Most items per page.
_PAGE_SIZE: Final = 1000
#: The daemon accepts as many variants in a call.
_TASK_IDS_PER_CALL: Final = 50


class Listings:
    """The calls of `AsyncEnvClient` that list and get."""

    @property
    def _host_pool(self) -> HostPool:
        raise NotImplementedError

    @checks_arguments
    async def list_servers(self, *, timeout: timedelta = timedelta(seconds=30)) -> list[Server]:
        """Return the release, capabilities and limits of every host that responds.

        Args:
            timeout: Timeout of each call.

        Raises:
            NotSupported: No host's release is as new as this call; `capabilities` works with all.
            EnvError: See the module's tree.
        """

        async def get_from(host: Host) -> Server:
            response = await host.connection.call("GetServer", env_pb2.GetServerRequest(), timeout)
            return read_server(response.server, host.target)

        return await self._host_pool.call_all(get_from, timeout=timeout)

    @checks_arguments
    async def capabilities(self, *, timeout: timedelta = timedelta(seconds=30)) -> frozenset[str]:
        """Return the names of `cuaenv.capabilities` that every host that responds has. Raises: EnvError."""

        async def list_on(host: Host) -> frozenset[str]:
            response = await host.connection.call("ListPools", env_pb2.ListPoolsRequest(), timeout)
            return frozenset(response.capabilities)

        first, *others = await self._host_pool.call_all(list_on, timeout=timeout)
        return first.intersection(*others)

    @checks_arguments
    async def get_task(self, task_id: str, *, timeout: timedelta = timedelta(seconds=30)) -> Task:
        """Return a task, or a variant of one such as `desktop/sort-invoices?seed=1`.

        If several hosts have it, a host that can run it goes before one that cannot.

        Raises:
            TaskNotFound: No host that responds has it.
            EnvError: See the module's tree.
        """

        async def get_from(host: Host) -> Task:
            response = await host.connection.call("GetTask", env_pb2.GetTaskRequest(task_id=task_id), timeout)
            return read_task(response.task)

        tasks = await self._host_pool.find_all(get_from, timeout=timeout)
        return min(tasks, key=lambda task: task.runnable is False)

    @checks_arguments
    async def list_tasks(
        self, *, suite: str = "", task_ids: Sequence[str] = (), timeout: timedelta = timedelta(seconds=30)
    ) -> list[Task]:
        """Return the tasks available on any host, in id order.

        Args:
            suite: Only those of this suite; empty for all.
            task_ids: Only these, including variants such as `desktop/sort-invoices?seed=1`; unknown ids are skipped.
                Empty for all tasks; of tasks with variants, the plain one.
            timeout: Timeout of each call.

        Raises:
            EnvError: See the module's tree.
        """
        starts = range(0, len(task_ids), _TASK_IDS_PER_CALL)
        parts = [task_ids[first : first + _TASK_IDS_PER_CALL] for first in starts] or [()]

        async def list_on(host: Host) -> list[Task]:
            requests = [env_pb2.ListTasksRequest(suite=suite, page_size=_PAGE_SIZE, task_ids=part) for part in parts]
            return [
                read_task(task)
                for request in requests
                async for page in _pages(host, "ListTasks", request, timeout)
                for task in page.tasks
            ]

        lists = await self._host_pool.call_all(list_on, timeout=timeout)
        # The first host wins, except that a host that can run a task goes before one that cannot.
        tasks = sorted((task for each in lists for task in each), key=lambda task: task.runnable is False)
        by_id = {task.task_id: task for task in reversed(tasks)}
        return [by_id[task_id] for task_id in sorted(by_id)]

    @checks_arguments
    async def list_pools(self, *, queues: bool = False, timeout: timedelta = timedelta(seconds=30)) -> list[Pool]:
        """Return the current pools of every host that responds, and with `queues` who waits there. Raises: EnvError."""

        async def list_on(host: Host) -> list[Pool]:
            response = await host.connection.call("ListPools", env_pb2.ListPoolsRequest(include_queue=queues), timeout)
            return [read_pool(pool, host.target) for pool in response.pools]

        return list(itertools.chain.from_iterable(await self._host_pool.call_all(list_on, timeout=timeout)))

    @checks_arguments
    async def get_episode(self, episode_id: str, *, timeout: timedelta = timedelta(seconds=30)) -> EpisodeInfo:
        """Return an open episode, which may be another client's that the token may list. Its lease is not renewed.

        Raises:
            EpisodeNotFound: It is not open on a host that responds.
            EnvError: See the module's tree.
        """

        async def get_from(host: Host) -> EpisodeInfo:
            request = env_pb2.GetEpisodeRequest(episode_id=episode_id)
            return read_episode((await host.connection.call("GetEpisode", request, timeout)).episode, host.target)

        return (await self._host_pool.find_all(get_from, timeout=timeout))[0]

    @checks_arguments
    async def list_episodes(self, *, timeout: timedelta = timedelta(seconds=30)) -> list[EpisodeInfo]:
        """Return the open episodes of every host that responds, oldest first; of all clients that the token may list.

        Args:
            timeout: Timeout of each call.

        Raises:
            EnvError: See the module's tree.
        """

        async def list_on(host: Host) -> list[EpisodeInfo]:
            pages = _pages(host, "ListEpisodes", env_pb2.ListEpisodesRequest(page_size=_PAGE_SIZE), timeout)
            return [read_episode(message, host.target) async for page in pages for message in page.episodes]

        lists = await self._host_pool.call_all(list_on, timeout=timeout)
        return sorted(itertools.chain.from_iterable(lists), key=lambda episode: episode.create_time)

    @checks_arguments
    async def get_checkpoint(self, checkpoint_id: str, *, timeout: timedelta = timedelta(seconds=30)) -> Checkpoint:
        """Return a checkpoint, for `reset`, `rollback` or `evaluate`.

        If it was exported to another host, either may be returned.

        Raises:
            CheckpointNotFound: No host that responds has it.
            CheckpointUnusable: Its description is damaged.
            EnvError: See the module's tree.
        """

        async def get_from(host: Host) -> Checkpoint:
            request = env_pb2.GetCheckpointRequest(checkpoint_id=checkpoint_id)
            response = await host.connection.call("GetCheckpoint", request, timeout)
            return read_checkpoint(response.checkpoint, host.target)

        return (await self._host_pool.find_all(get_from, timeout=timeout))[0]

    @checks_arguments
    async def list_checkpoints(
        self, *, run: str = "", task: str = "", episode_id: str = "", timeout: timedelta = timedelta(seconds=30)
    ) -> list[Checkpoint]:
        """Return the checkpoints of every host that responds, oldest first.

        Args:
            run: Only those of this run; empty for all.
            task: Only those of this task; empty for all.
            episode_id: Only those of this episode, which may have ended; empty for all.
            timeout: Timeout of each call.

        Raises:
            EnvError: See the module's tree.
        """

        async def list_on(host: Host) -> list[Checkpoint]:
            request = env_pb2.ListCheckpointsRequest(
                page_size=_PAGE_SIZE, run=run, task_id=task, source_episode_id=episode_id
            )
            pages = _pages(host, "ListCheckpoints", request, timeout)
            return [read_checkpoint(message, host.target) async for page in pages for message in page.checkpoints]

        lists = await self._host_pool.call_all(list_on, timeout=timeout)
        return sorted(itertools.chain.from_iterable(lists), key=lambda checkpoint: checkpoint.create_time)


async def _pages(host: Host, method: str, request: Any, timeout: timedelta) -> AsyncIterator[Any]:
    """Yield the responses of a listing, one per page. Raises: EnvError."""
    while True:
        response = await host.connection.call(method, request, timeout)
        yield response
        request.page_token = response.next_page_token
        if not request.page_token:
            return
