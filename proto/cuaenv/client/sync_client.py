"""The synchronous client: runs the asyncio client on a loop in its own thread."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import timedelta
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

from cuaenv.argument_types import require_types
from cuaenv.client.async_client import AsyncEnvClient
from cuaenv.client.connection import closed_error, require_own_process
from cuaenv.client.credentials import Tls
from cuaenv.client.episode import AsyncEpisode, Opening, close_all
from cuaenv.client.errors import ClientClosed, EnvError
from cuaenv.client.forwarding import PortForward
from cuaenv.client.host import Host
from cuaenv.client.host_pool import ClientStatistics
from cuaenv.client.observation import Observation
from cuaenv.client.placement import RetryPolicy
from cuaenv.client.results import Checkpoint, EpisodeInfo, Origin, State
from cuaenv.client.signatures import takes_options_of
from cuaenv.client.view import ResetOptions, Settle, View
from cuaenv.loop_thread import LoopThread

Inner_co = TypeVar("Inner_co", covariant=True)
Result = TypeVar("Result")
P = ParamSpec("P")

_LAST_CALLS_S: Final = 5.0


class _Blocking(Generic[Inner_co]):
    """Runs methods of an asyncio object on its client's loop."""

    _inner: Inner_co
    _client: "EnvClient"

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = self._client._start(work)
        try:
            return future.result()
        except EnvError as error:
            raise error.with_traceback(None) from None  # the loop's frames are of no use to the caller
        except CancelledError:  # by `EnvClient.close`
            raise closed_error(", ".join(self._client.targets)) from None
        except BaseException:
            # An interrupted caller no longer needs the result.
            future.cancel()
            raise

    @contextmanager
    def _entered(self, block: AbstractAsyncContextManager[Result]) -> Iterator[Result]:
        """Enter and leave a block of the asyncio client."""
        entered = self._wait(block.__aenter__())
        try:
            yield entered
        finally:
            self._wait(block.__aexit__(None, None, None))


def _blocking(
    method: Callable[Concatenate[Inner_co, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[_Blocking[Inner_co], P], Result]:
    """Return a method that runs an asyncio one to its end, with the same arguments, result and errors."""

    @wraps(method)
    def call(self: _Blocking[Inner_co], /, *args: P.args, **options: P.kwargs) -> Result:
        return self._wait(method(self._inner, *args, **options))

    return call


class EnvClient(_Blocking[AsyncEnvClient]):
    """`AsyncEnvClient` for code without an event loop; it runs one in its own thread. Use as a context manager."""

    @takes_options_of(AsyncEnvClient.__init__, without=["keep_alive_interval", "rng"])
    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        run: str = "",
        max_episodes: int | None = None,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        expects_idle: bool = False,
    ) -> None:
        """Create a client; the first call connects."""
        self._inner = AsyncEnvClient(
            targets, run=run, max_episodes=max_episodes, retry=retry, token=token, tls=tls, expects_idle=expects_idle
        )
        # Before the thread starts: in a forked process it was seen to hang, on a busy host.
        require_own_process(", ".join(self.targets))
        self._client = self
        self._starting = threading.RLock()
        """Held to start calls, so that none starts after the end."""
        self._ending: Future[None] | None = None
        self._thread = LoopThread(f"EnvClient:{targets}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect and end the thread, also if interrupted. Idempotent; calls from now on raise `ClientClosed`."""
        if self._thread.pid != os.getpid():
            return
        with self._starting:
            if self._ending is None:
                self._ending = self._thread.start(self._end())
                self._ending.add_done_callback(lambda _: self._thread.stop())
        try:
            wait_for([self._ending])
        finally:  # also after an interrupt; a second one ends the wait
            self._ending.result()
            self._thread.join()

    @property
    def targets(self) -> tuple[str, ...]:
        """The addresses that it was given."""
        return self._inner.targets

    @takes_options_of(AsyncEnvClient.reset)
    def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> "Episode":
        """Open one episode of a task or checkpoint, and renew its lease until `Episode.close`.

        It also is a block, which closes it on exit: `with client.reset(task) as episode:`.
        """
        return Episode(self._wait(_opened(self._inner.reset(task, **options))), self)

    open = reset

    @takes_options_of(AsyncEnvClient.reset_group)
    def reset_group(self, task: str | Checkpoint, *, size: int, **options: Unpack[ResetOptions]) -> "Episodes":
        """Open episodes of one task, all or none, and renew their leases until they are closed.

        They also are a block, which closes them on exit: `with client.reset_group(task, size=2) as (one, other):`.
        """
        return self._episodes(self._inner.reset_group(task, size=size, **options))

    open_group = reset_group

    @takes_options_of(AsyncEnvClient.fork)
    def fork(
        self,
        parent: "Episode",
        *,
        count: int,
        lease_ttl: timedelta = timedelta(minutes=5),
        view: View | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> "Episodes":
        """Branch an active episode: open copies of its current state, all or none, as `reset_group` does."""
        require_types("EnvClient.fork", {"parent": Episode}, {"parent": parent})
        forks = self._inner.fork(parent._inner, count=count, lease_ttl=lease_ttl, view=view, timeout=timeout)
        return self._episodes(forks)

    @takes_options_of(AsyncEnvClient.attach)
    def attach(
        self,
        episode_id: str,
        *,
        lease_ttl: timedelta = timedelta(minutes=5),
        keep_open: bool = False,
        settle: Settle | None = None,
        view: View | None = None,
        coordinate_space: tuple[int, int] | None = None,
        timeout: timedelta = timedelta(minutes=1),
    ) -> "Episode":
        """Take over an open episode of an earlier process with the same token, as `reset` opens a new one."""
        opening = self._inner.attach(
            episode_id,
            lease_ttl=lease_ttl,
            keep_open=keep_open,
            settle=settle,
            view=view,
            coordinate_space=coordinate_space,
            timeout=timeout,
        )
        return Episode(self._wait(_opened(opening)), self)

    list_servers = _blocking(AsyncEnvClient.list_servers)
    get_task = _blocking(AsyncEnvClient.get_task)
    list_tasks = _blocking(AsyncEnvClient.list_tasks)
    list_pools = _blocking(AsyncEnvClient.list_pools)
    capabilities = _blocking(AsyncEnvClient.capabilities)
    get_episode = _blocking(AsyncEnvClient.get_episode)
    list_episodes = _blocking(AsyncEnvClient.list_episodes)
    get_checkpoint = _blocking(AsyncEnvClient.get_checkpoint)
    list_checkpoints = _blocking(AsyncEnvClient.list_checkpoints)
    evaluate = _blocking(AsyncEnvClient.evaluate)
    delete_checkpoint = _blocking(AsyncEnvClient.delete_checkpoint)
    export_checkpoint = _blocking(AsyncEnvClient.export_checkpoint)
    import_checkpoint = _blocking(AsyncEnvClient.import_checkpoint)
    close_episode = _blocking(AsyncEnvClient.close_episode)

    def statistics(self) -> ClientStatistics:
        """Return statistics of the hosts."""

        async def read() -> ClientStatistics:
            return self._inner.statistics()

        return self._wait(read())

    @takes_options_of(AsyncEnvClient.forward)
    def forward(
        self, episode: EpisodeInfo, port: int, *, local_port: int = 0, timeout: timedelta = timedelta(seconds=30)
    ) -> AbstractContextManager[PortForward]:
        """Forward a local port to a port of a listed episode's guest during a block; see `Episode.forward`."""
        return self._entered(self._inner.forward(episode, port, local_port=local_port, timeout=timeout))

    def _episodes(self, opening: Opening[Sequence[AsyncEpisode]]) -> "Episodes":
        return Episodes(Episode(episode, self) for episode in self._wait(_opened(opening)))

    def _start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Start a coroutine on the loop. Raises: ClientClosed."""
        try:
            # Before the lock, which another thread may have held when this process was forked.
            require_own_process(", ".join(self.targets), self._thread.pid)
            with self._starting:
                if self._ending is not None:
                    raise closed_error(", ".join(self.targets))
                return self._thread.start(work)
        except ClientClosed:
            work.close()
            raise

    async def _end(self) -> None:
        await self._inner.aclose()
        # Calls of other threads, or of an interrupted one, fail now. The end of the loop cancels those that do not.
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(calls, timeout=_LAST_CALLS_S)


async def _opened(opening: Opening[Result]) -> Result:
    return await opening


class Episode(_Blocking[AsyncEpisode]):
    """`AsyncEpisode` for code without an event loop."""

    host: Host
    episode_id: str
    group_id: str
    parent_episode_id: str
    checkpoint_id: str
    perturbations: tuple[str, ...]
    origin: Origin
    task_id: str
    pool: str
    max_steps: int
    tools: tuple[str, ...]
    instruction: str
    observation: Observation
    opening_timings_ms: Mapping[str, float]
    state: State
    end_reason: str
    guest_end_cause: str
    step_count: int
    epoch: int
    is_closed: bool

    def __init__(self, episode: AsyncEpisode, client: EnvClient) -> None:
        self._inner = episode
        self._client = client

    def __repr__(self) -> str:
        return repr(self._inner).replace("AsyncEpisode", "Episode", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    step = _blocking(AsyncEpisode.step)
    observe = _blocking(AsyncEpisode.observe)
    handed_back = _blocking(AsyncEpisode.handed_back)
    evaluate = _blocking(AsyncEpisode.evaluate)
    checkpoint = _blocking(AsyncEpisode.checkpoint)
    rollback = _blocking(AsyncEpisode.rollback)
    close = _blocking(AsyncEpisode.close)
    read_file = _blocking(AsyncEpisode.read_file)
    write_file = _blocking(AsyncEpisode.write_file)
    run_command = _blocking(AsyncEpisode.run_command)

    @takes_options_of(AsyncEpisode.forward)
    def forward(self, port: int, *, local_port: int = 0) -> AbstractContextManager[PortForward]:
        """Listen on 127.0.0.1 during a block; each connection leads to a TCP port of the guest's 127.0.0.1."""
        return self._entered(self._inner.forward(port, local_port=local_port))


class Episodes(tuple[Episode, ...]):
    """Episodes that were opened together, until they are closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release their machines together; see `Episode.close`."""
        if self:
            self[0]._wait(close_all([episode._inner for episode in self]))


# Each declared attribute is that of the asyncio episode.
for _name in Episode.__annotations__:
    setattr(Episode, _name, property(attrgetter(f"_inner.{_name}")))
