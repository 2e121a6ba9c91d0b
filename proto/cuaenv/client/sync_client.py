"""The synchronous client: runs the asyncio client on a loop in its own thread."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from cuaenv.actions import Action
from cuaenv.client.async_client import AsyncEnvClient
from cuaenv.client.credentials import Tls
from cuaenv.client.episode import AsyncEpisode
from cuaenv.client.forwarding import PortForward
from cuaenv.client.observation import Observation
from cuaenv.client.options import ForkOptions, ResetOptions, StepOptions
from cuaenv.client.results import CommandResult, EpisodeInfo, Evaluation, Pool, State, StepResult, Task
from cuaenv.client.retry import RetryPolicy
from cuaenv.client.view import Settle, View

Result = TypeVar("Result")


class EnvClient:
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
        self._client = AsyncEnvClient(targets, run=run, max_episodes=max_episodes, retry=retry, token=token, tls=tls)
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
        self._wait(self._client.aclose())
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
        opening = self._client.reset_group(task, size=size, **options)
        episodes = self._wait(opening.__aenter__())
        try:
            yield [Episode(self, episode) for episode in episodes]
        finally:
            self._wait(opening.__aexit__(None, None, None))

    @contextmanager
    def fork(self, parent: "Episode", *, count: int, **options: Unpack[ForkOptions]) -> Iterator[Sequence["Episode"]]:
        """Branch an active episode, all copies or none. Options are those of `AsyncEnvClient.fork`."""
        forking = self._client.fork(parent._episode, count=count, **options)
        episodes = self._wait(forking.__aenter__())
        try:
            yield [Episode(self, episode) for episode in episodes]
        finally:
            self._wait(forking.__aexit__(None, None, None))

    def list_tasks(
        self, *, suite: str = "", task_ids: Sequence[str] = (), timeout: timedelta = timedelta(seconds=30)
    ) -> list[Task]:
        """Return the available tasks, in id order. Arguments are those of `AsyncEnvClient.list_tasks`."""
        return self._wait(self._client.list_tasks(suite=suite, task_ids=task_ids, timeout=timeout))

    def list_pools(self, *, queues: bool = False, timeout: timedelta = timedelta(seconds=30)) -> list[Pool]:
        """Return the daemon's current pools, and with `queues` who waits there. Raises: EnvError."""
        return self._wait(self._client.list_pools(queues=queues, timeout=timeout))

    def list_episodes(self, *, timeout: timedelta = timedelta(seconds=30)) -> list[EpisodeInfo]:
        """Return the open episodes, oldest first; of all clients that the token may list. Raises: EnvError."""
        return self._wait(self._client.list_episodes(timeout=timeout))

    def close_episode(self, episode: EpisodeInfo, *, timeout: timedelta = timedelta(seconds=30)) -> None:
        """Close a listed episode, which may be another client's. Idempotent. Raises: EnvError."""
        self._wait(self._client.close_episode(episode, timeout=timeout))

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupted caller no longer needs the result.
            future.cancel()
            raise


class Episode:
    """`AsyncEpisode` for code without an event loop."""

    def __init__(self, client: EnvClient, episode: AsyncEpisode) -> None:
        self._client = client
        self._episode = episode
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
        return repr(self._episode)

    @property
    def observation(self) -> Observation:
        """The latest observation."""
        return self._episode.observation

    @property
    def state(self) -> State:
        """State of the episode, as of the last response."""
        return self._episode.state

    @property
    def step_count(self) -> int:
        """Steps performed, as of the last response."""
        return self._episode.step_count

    def step(self, *actions: Action, **options: Unpack[StepOptions]) -> StepResult:
        """Perform actions, wait for the screen to settle, and observe; see `AsyncEpisode.step`. Raises: EnvError."""
        return self._client._wait(self._episode.step(*actions, **options))

    def observe(self, *, refresh: bool = False, settle: Settle | None = None, view: View | None = None) -> Observation:
        """Observe without acting. Raises: EnvError."""
        return self._client._wait(self._episode.observe(refresh=refresh, settle=settle, view=view))

    def evaluate(self, *, timeout: timedelta = timedelta(minutes=5)) -> Evaluation:
        """Score the episode, and end it. Raises: EnvError."""
        return self._client._wait(self._episode.evaluate(timeout=timeout))

    def close(self) -> None:
        """Release the machine. Idempotent; never fails."""
        self._client._wait(self._episode.close())

    def read_file(self, path: str) -> bytes:
        """Return a guest file's bytes, if the pool allows it. Raises: EnvError."""
        return self._client._wait(self._episode.read_file(path))

    def write_file(self, path: str, data: bytes) -> None:
        """Write a whole guest file, if the pool allows it. Raises: EnvError."""
        self._client._wait(self._episode.write_file(path, data))

    def run_command(
        self,
        argv: Sequence[str],
        *,
        as_root: bool = False,
        stdin: bytes = b"",
        timeout: timedelta = timedelta(minutes=1),
    ) -> CommandResult:
        """Run a command in the guest to its end, if the pool allows it. Raises: EnvError."""
        return self._client._wait(self._episode.run_command(argv, as_root=as_root, stdin=stdin, timeout=timeout))

    @contextmanager
    def forward(self, port: int, *, local_port: int = 0) -> Iterator[PortForward]:
        """Listen on 127.0.0.1 during the block; connections lead to a port of the guest. See `AsyncEpisode.forward`."""
        forwarding = self._episode.forward(port, local_port=local_port)
        forward = self._client._wait(forwarding.__aenter__())
        try:
            yield forward
        finally:
            self._client._wait(forwarding.__aexit__(None, None, None))
