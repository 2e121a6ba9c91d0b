"""The synchronous client: runs the asyncio client on a loop in its own thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from cuaenv.client.async_client import AsyncEnvClient
from cuaenv.client.credentials import Tls
from cuaenv.client.episode import AsyncEpisode
from cuaenv.client.forwarding import PortForward
from cuaenv.client.observation import Observation
from cuaenv.client.placement import RetryPolicy
from cuaenv.client.results import State
from cuaenv.client.view import ForkOptions, ResetOptions

Inner = TypeVar("Inner")
Result = TypeVar("Result")
P = ParamSpec("P")


class _Blocking(Generic[Inner]):
    """Runs methods of an asyncio object on its client's loop."""

    _inner: Inner
    _loop: asyncio.AbstractEventLoop

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupted caller no longer needs the result.
            future.cancel()
            raise


def _blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[_Blocking[Inner], P], Result]:
    """Return a method that runs an asyncio one to its end, with the same arguments, result and errors."""

    @wraps(method)
    def call(self: _Blocking[Inner], /, *args: P.args, **options: P.kwargs) -> Result:
        return self._wait(method(self._inner, *args, **options))

    return call


class EnvClient(_Blocking[AsyncEnvClient]):
    """`AsyncEnvClient` for code without an event loop; it runs one in its own thread. Use as a context manager."""

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        run: str = "",
        max_episodes: int | None = None,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Create a client; arguments and errors are those of `AsyncEnvClient`."""
        self._inner = AsyncEnvClient(targets, run=run, max_episodes=max_episodes, retry=retry, token=token, tls=tls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"EnvClient:{targets}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._inner.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def reset(self, task: str, **options: Unpack[ResetOptions]) -> Iterator["Episode"]:
        """Open one episode, and close it on exit. Options are those of `AsyncEnvClient.reset_group`."""
        with self.reset_group(task, size=1, **options) as episodes:
            yield episodes[0]

    @contextmanager
    def reset_group(self, task: str, *, size: int, **options: Unpack[ResetOptions]) -> Iterator[Sequence["Episode"]]:
        """Open episodes of one task, all or none. Options are those of `AsyncEnvClient.reset_group`."""
        with self._opened(self._inner.reset_group(task, size=size, **options)) as episodes:
            yield episodes

    @contextmanager
    def fork(self, parent: "Episode", *, count: int, **options: Unpack[ForkOptions]) -> Iterator[Sequence["Episode"]]:
        """Branch an active episode, all copies or none. Options are those of `AsyncEnvClient.fork`."""
        with self._opened(self._inner.fork(parent._inner, count=count, **options)) as episodes:
            yield episodes

    list_tasks = _blocking(AsyncEnvClient.list_tasks)
    list_pools = _blocking(AsyncEnvClient.list_pools)
    list_episodes = _blocking(AsyncEnvClient.list_episodes)
    close_episode = _blocking(AsyncEnvClient.close_episode)

    @contextmanager
    def _opened(self, opening: AbstractAsyncContextManager[Sequence[AsyncEpisode]]) -> Iterator[Sequence["Episode"]]:
        episodes = self._wait(opening.__aenter__())
        try:
            yield [Episode(episode, self._loop) for episode in episodes]
        finally:
            self._wait(opening.__aexit__(None, None, None))


class Episode(_Blocking[AsyncEpisode]):
    """`AsyncEpisode` for code without an event loop."""

    def __init__(self, episode: AsyncEpisode, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = episode
        self._loop = loop
        self.episode_id = episode.episode_id
        self.group_id = episode.group_id
        self.parent_episode_id = episode.parent_episode_id
        """The episode that it was forked from; empty if none."""
        self.origin = episode.origin
        """Origin of its first state."""
        self.task_id = episode.task_id
        self.pool = episode.pool
        self.instruction = episode.instruction
        """The task's instruction for the agent."""

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def observation(self) -> Observation:
        """The latest observation."""
        return self._inner.observation

    @property
    def state(self) -> State:
        """State of the episode, as of the last response."""
        return self._inner.state

    @property
    def step_count(self) -> int:
        """Steps performed, as of the last response."""
        return self._inner.step_count

    step = _blocking(AsyncEpisode.step)
    observe = _blocking(AsyncEpisode.observe)
    evaluate = _blocking(AsyncEpisode.evaluate)
    close = _blocking(AsyncEpisode.close)
    read_file = _blocking(AsyncEpisode.read_file)
    write_file = _blocking(AsyncEpisode.write_file)
    run_command = _blocking(AsyncEpisode.run_command)

    @contextmanager
    def forward(self, port: int, *, local_port: int = 0) -> Iterator[PortForward]:
        """Listen on 127.0.0.1 during the block; connections lead to a port of the guest. See `AsyncEpisode.forward`."""
        forwarding = self._inner.forward(port, local_port=local_port)
        forward = self._wait(forwarding.__aenter__())
        try:
            yield forward
        finally:
            self._wait(forwarding.__aexit__(None, None, None))
